"""Planted mistakes of which one comparison of `raymega verify` says more than the others, or says it alone."""

from __future__ import annotations

from dataclasses import dataclass

from raymega.verify.layout import Layout
from raymega.verify.rounding import Precision
from tests.mutations.mutation import EXPERTS, TASKS, Mutation


@dataclass(frozen=True, kw_only=True)
class ComparedMutation(Mutation):
    """A mistake with the comparison that shows it.

    Attributes:
        quantity: Regular expression of the quantities that deviate first.
        precision: Dtype in which the mistake shows.
        saved_on: Layout that saves the checkpoint from which ``layout`` goes on; None trains without one.
    """

    quantity: str
    precision: Precision = "float64"
    saved_on: Layout | None = None


TWO_AHEAD = ("model.num_nextn_predict_layers=1", "model.tie_word_embeddings=false")
SHARDED = Layout(dp=2, sharding="optimizer", micro_batch_size=1)
TOLD = "        loss=seen.loss, mtp_loss=seen.mtp_loss, grad_norm=seen.grad_norm, lr=lr,\n"
ROUND = "            self._round(self._update_chunks[number])\n"
COMPARISONS: tuple[ComparedMutation, ...] = (
    # scalars that are told
    ComparedMutation(
        name="a pipeline rank without the loss tells no learning rate",
        file="train/step.py",
        old=TOLD,
        new=TOLD.replace("lr=lr,", "lr=lr * parts.has_loss,"),
        layout=Layout(pp=2),
        quantity="lr",
    ),
    ComparedMutation(
        name="tokens that are told are a context-parallel rank's share",
        file="train/step.py",
        old="tokens=round(totals.tokens),\n",
        new="tokens=round(totals.tokens / parts.plan.grid.cp),\n",
        layout=Layout(cp=2),
        quantity="tokens",
    ),
    ComparedMutation(
        name="the load of experts that is told is a rank's own",
        file="train/step.py",
        old="loads=parts.routers.loads(host[len(mine) :].view_as(routing)),",
        new="loads=parts.routers.loads(routing.cpu()),",
        layout=Layout(dp=2),
        job=EXPERTS,
        quantity="expert load of layer .*",
    ),
    ComparedMutation(
        name="the loss of tokens further ahead is that of the last micro-batch",
        file="model/pipeline_stage.py",
        old="        self.mtp_loss_sum = self.mtp_loss_sum + further.detach()\n",
        new="        self.mtp_loss_sum = further.detach()\n",
        layout=Layout(micro_batch_size=2),
        job=TWO_AHEAD,
        quantity="mtp_loss",
    ),
    # state that is wrong a step before weights are
    ComparedMutation(
        name="moments of a shard decay once more after its update",
        file="optim/optimizer.py",
        old=ROUND,
        new=f"{ROUND}"
        "            for each in self._update_chunks[number]:\n"
        "                for member in each.members:\n"
        "                    if each.part.end - each.part.begin < each.part.bucket.size:\n"
        "                        member.param_state.state[0].mul_(0.9)\n",
        layout=SHARDED,
        quantity="adam.exp_avg/.*",
    ),
    # checkpoints
    ComparedMutation(
        name="the second moment is left out of what is loaded",
        file="checkpoint/load/reader.py",
        old="    for block in blocks:\n        by_tensor.setdefault(block.name, []).append(block)\n",
        new="    for block in blocks:\n"
        '        if not block.name.startswith("adam.exp_avg_sq"):\n'
        "            by_tensor.setdefault(block.name, []).append(block)\n",
        layout=Layout(tp=2),
        saved_on=Layout(dp=2),
        quantity=".*",
    ),
    ComparedMutation(
        name="moments that wait on the host are saved as they were before",
        file="optim/optimizer.py",
        old="            yield replace(block, values=self._host.on_host(block.values))\n",
        new="            values = self._host.on_host(block.values)\n"
        '            is_left = self._is_on_host and block.kind == "adam.exp_avg"\n'
        "            yield replace(block, values=values * 0 if is_left else values)\n",
        layout=Layout(dp=2),
        saved_on=Layout(tp=2, offload=("optimizer",)),
        quantity="adam.exp_avg/.*",
    ),
    # below float64 only
    ComparedMutation(
        name="masters take over what was rounded for the forward pass",
        file="optim/optimizer.py",
        old=ROUND,
        new=f"{ROUND}"
        "            for each in self._update_chunks[number]:\n"
        "                each.master.copy_(each.weights)\n",
        layout=SHARDED,
        precision="bfloat16",
        quantity=r"[\w.*]+weight",
    ),
    ComparedMutation(
        name="weights of which a rank updates a part are not rounded anew",
        file="optim/optimizer.py",
        old=ROUND,
        new="            self._round([\n"
        "                each for each in self._update_chunks[number]\n"
        "                if each.part.end - each.part.begin == each.part.bucket.size\n"
        "            ])\n",
        layout=SHARDED,
        job=TASKS,
        precision="bfloat16",
        quantity="(eval_)?loss|grad_norm|.*weight",
    ),
    ComparedMutation(
        name="gradients pass through bfloat16 on their way to the update",
        file="optim/optimizer.py",
        old="        self._step.fill_(step)\n",
        new="        self._step.fill_(step)\n"
        "        for each in self._bucket_state:\n"
        "            each.gradient.copy_(each.gradient.bfloat16())\n",
        layout=SHARDED,
        precision="float32",
        quantity=".*",
    ),
)
