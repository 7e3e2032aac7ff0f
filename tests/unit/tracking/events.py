"""A run with one failure, as its driver tells it; every kind of event is in it."""

from raymega.events import (
    ArtefactWritten,
    AttemptFailed,
    AttemptStarted,
    BadStep,
    CheckpointCommitted,
    EvaluationFinished,
    Memory,
    NodesChecked,
    Recovered,
    RunFinished,
    RunStarted,
    SamplesDrawn,
    SaveFailed,
    SaveProgress,
    SaveSkipped,
    StepFinished,
    StragglerDetected,
    TasksEvaluated,
    Timeline,
    WorkersStarted,
)
from raymega.tracking.timeline_metrics import rank_timeline_metrics, timeline_metrics

GRID = {"tp": 2, "pp": 2, "dp": 2, "cp": 1, "ep": 1, "etp": 1}
JOB = {
    "run": {"name": "demo", "steps": 4, "seed": 7},
    "model": {"family": "gpt2", "hidden_size": 64},
    "parallel": {"tp": 2},
}


def run_started(**changes):
    values = {
        "run_id": "r1",
        "name": "demo",
        "uri": "file:///runs/demo",
        "is_resumed": False,
        "step": 0,
        "total_steps": 4,
        "job": JOB,
    }
    return RunStarted(**values | changes)


def attempt_started(attempt, step=0, reason="first start"):
    plan = {"world_size": 8, "schedule": "1f1b"}
    return AttemptStarted(attempt=attempt, step=step, grid=GRID, plan=plan, reason=reason)


def step_finished(step, attempt=1, loss=0.0):
    metrics = {
        "train/loss": loss or 10.0 / step,
        "train/mtp_loss": 3.0,
        "train/pair_loss": 0.6,
        "preference/chosen_reward": 0.2,
        "preference/rejected_reward": -0.1,
        "preference/accuracy": 0.75,
        "preference/divergence": 0.3,
        "distillation/divergence": 0.4,
        "distillation/cross_entropy": 2.6,
        "head/accuracy": 0.7,
        "train/grad_norm": 0.5,
        "train/lr": 3e-4,
        "train/role_lr/embedding": 6e-4,
        "data/source_tokens/web": 4096.0,
        "data/source_epochs/web": 0.5,
        "data/image_token_share": 0.25,
        "train/images_per_s": 16.0,
        "data/wait_s": 0.01,
        "data/fetched_bytes": 4096.0,
        "data/cache_hits": 3.0,
        "data/cache_misses": 1.0,
        "train/global_batch_size": 8.0,
        "train/loss_scale": 65536.0,
        "train/skipped_steps": 0.0,
        "plugin/metric/acme.gap": 0.5,
        "run/spares": 1.0,
        "run/lease_age_s": 2.0,
        "train/group_weight_norm/attention.q": 3.0,
        "train/group_grad_norm/attention.q": 0.25,
        "train/output_mean/0": 0.0,
        "moe/max_load/1": 1.5,
        "moe/min_load/1": 0.5,
        "moe/starved_share/1": 0.0,
        "moe/drop_rate/1": 0.1,
        "moe/router_entropy/1": 1.2,
        "moe/router_loss/1": 0.01,
        "train/output_std/0": 1.0,
        "train/output_max_abs/0": 4.0,
        "train/output_grad_mean/0": 0.0,
        "train/output_grad_std/0": 1e-3,
        "train/output_grad_max_abs/0": 1e-2,
        "train/tokens": 1024.0 * step,
        "train/samples": 8.0 * step,
        "train/step_time_s": 0.125,
        "train/divergence_check_s": 0.002,
        "train/tokens_per_s": 8192.0,
        "train/tokens_per_s_per_worker": 1024.0,
        "train/tflops_per_worker": 0.5,
        "train/mfu": 0.25,
        "comm/cp_sent_bytes": 4096.0,
        "comm/experts_sent_bytes": 8192.0,
        "comm/update_sent_bytes": 2048.0,
        "data/packing_efficiency": 0.99,
        "data/imbalance": 1.03,
        "data/micro_batches": 4.0,
        "data/pack_ranks": 1.75,
        "data/most_pack_ranks": 8.0,
        "data/schedule_wait_s": 0.01,
        "checkpoint/snapshot_step": step - 1.0,
        "checkpoint/snapshot_lacking": 0.0,
        "checkpoint/snapshot_stall_s": 0.001,
        "checkpoint/snapshot_s": 0.01,
        "checkpoint/snapshot_bytes": 4096.0,
    }
    return StepFinished(attempt=attempt, step=step, metrics=metrics)


TASKS = TasksEvaluated(
    attempt=1,
    step=2,
    metrics={
        "eval/task/lambada/accuracy": 0.25,
        "eval/task/lambada/target_perplexity": 88.5,
        "eval/task/race/accuracy": 0.5,
    },
)


def checkpoint(step, attempt=1):
    return CheckpointCommitted(
        attempt=attempt,
        step=step,
        uri=f"file:///runs/demo/checkpoints/step-{step:08}",
        stall_s=0.012,
        save_s=0.4,
        num_bytes=12 * 1024**2,
    )


def run_finished(status="finished", step=4):
    return RunFinished(
        status=status,
        step=step,
        checkpoint_uri="file:///runs/demo/checkpoints/step-00000004",
        goodput=0.93,
        wall_s=252.0,
    )


ROWS = {
    0: (
        ("forward", 0, 0, 0.0, 1.0),
        ("backward", 0, 0, 4.0, 6.0),
        ("reduce", 0, 0, 5.0, 7.0),
        ("wait_reduce", 0, 0, 6.0, 7.0),
        ("cp_pass", 0, 0, 0.0, 1.0),
        ("wait_cp_pass", 0, 0, 0.75, 1.0),
        ("ep_exchange", 0, 0, 1.0, 1.5),
        ("wait_ep_exchange", 0, 0, 1.25, 1.5),
        ("matrix_exchange", 0, 0, 3.0, 3.25),
        ("wait_matrix_exchange", 0, 0, 3.0, 3.25),
    ),
    1: (("forward", 0, 0, 1.0, 2.0), ("recv_forward", 0, 0, 0.0, 1.0)),
}
TIMELINE = Timeline(
    attempt=2,
    step=4,
    events=ROWS,
    metrics=timeline_metrics(ROWS.values(), simulated_bubble=0.5),
    ranks={rank: rank_timeline_metrics(row) for rank, row in ROWS.items()},
)
MEMORY = Memory(
    attempt=2,
    step=4,
    ranks={
        0: {"memory/peak_bytes": 64.0, "memory/allocated_bytes": 32.0, "worker/work_s": 0.1},
        1: {"memory/peak_bytes": 96.0, "memory/allocated_bytes": 48.0, "worker/work_s": 0.2},
    },
    metrics={"memory/max_peak_bytes": 96.0, "worker/max_work_ratio": 2.0},
)
BAD_STEP = BadStep(
    attempt=1, step=2, kind="nan", fact="loss=nan", where="", action="used the second pass"
)
STRAGGLER = StragglerDetected(attempt=2, step=4, rank=1, node="a", work_s=0.2, ratio=2.0)
RECOVERED = Recovered(
    attempt=2, rank=3, step=3, restored_step=2, lost_steps=1, detection_s=0.5, recovery_s=3.0
)


def whole_run(artefact="/tmp/loss.svg"):
    return (
        run_started(),
        attempt_started(1),
        WorkersStarted(attempt=1, pids={0: 100, 1: 101}, nodes={0: "a", 1: "a"}),
        NodesChecked(attempt=1, seconds=0.25, detail="versions are right on 1 node"),
        step_finished(1),
        BAD_STEP,
        step_finished(2),
        EvaluationFinished(
            attempt=1,
            step=2,
            metrics={
                "eval/loss": 5.25,
                "eval/perplexity": 190.57,
                "eval/accuracy": 0.6,
                "eval/set_loss/held": 5.25,
                "eval/set_perplexity/held": 190.57,
                "eval/set_accuracy/held": 0.6,
                "eval/ema_loss": 5.0,
                "eval/ema_perplexity": 148.41,
                "eval/ema_accuracy": 0.7,
                "eval/set_ema_loss/held": 5.0,
                "eval/set_ema_perplexity/held": 148.41,
                "eval/set_ema_accuracy/held": 0.7,
            },
        ),
        TASKS,
        checkpoint(2),
        step_finished(3),
        SaveFailed(attempt=1, step=3, reason="disk is full"),
        SaveProgress(attempt=1, step=3, written_bytes=2**19, num_bytes=2**21),
        SaveSkipped(attempt=1, step=3),
        AttemptFailed(attempt=1, rank=3, step=3, cause="killed by signal 9"),
        attempt_started(2, step=2, reason="worker 3 died"),
        step_finished(3, attempt=2),
        RECOVERED,
        step_finished(4, attempt=2),
        TIMELINE,
        MEMORY,
        STRAGGLER,
        SamplesDrawn(attempt=2, step=4, prompts=("a b", "c"), texts=(" d", "\n")),
        checkpoint(4, attempt=2),
        ArtefactWritten(path=artefact, title="Loss curve"),
        run_finished(),
    )
