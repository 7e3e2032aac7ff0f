"""Whole runs whose checkpoints and data lie in an object store, as a user starts them."""

import pytest
from ray.cluster_utils import Cluster

from raymega.checkpoint.tools.inspection import verify_checkpoints
from raymega.data.export import export_megatron
from raymega.prepare.options import PrepareOptions
from raymega.prepare.pipeline import prepare
from raymega.session import close_session, open_session
from raymega.storage.registry import open_store
from tests.support.command import train
from tests.support.servers.s3_server import BUCKET, SECRET_KEY, environment, exported, moto_server
from tests.unit.data.datasets import write_dataset

pytestmark = [pytest.mark.ray, pytest.mark.wide]

RUN = f"s3://{BUCKET}/team/runs/verify"
LIMIT = 1e-9


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The home folder of the processes under test: a run in a store keeps its logs there."""
    with moto_server() as endpoint:
        folder = tmp_path_factory.mktemp("home")
        with exported(environment(endpoint) | {"HOME": str(folder)}):
            yield folder


@pytest.fixture(scope="module")
def address(home):
    """A cluster whose nodes have the same environment as the driver."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    yield cluster.address
    cluster.shutdown()


def _settings(*more: str) -> list[str]:
    return [
        f"checkpoint.uri={RUN.removesuffix('/verify')}",
        "run.steps=6",
        "run.eval_samples=4",
        "optimizer.lr_decay_steps=100",
        "tracking.mlflow_uri=off",
        "checkpoint.every=2",
        *more,
    ]


def test_run_is_resumed_from_an_object_store_on_another_grid(home, address):
    first = train(*_settings(), address=address)
    assert first.code == 0, first.stderr
    final = first.events[-1]["checkpoint_uri"]
    assert final.startswith(f"{RUN}/checkpoints/")
    open_store(RUN).delete(final.removeprefix(f"{RUN}/"))
    again = train(*_settings("parallel.pp=1", "parallel.dp=2"), address=address)
    assert again.code == 0, again.stderr
    assert [event["step"] for event in again.all("step")] == [5, 6]
    for step in (5, 6):
        assert again.losses[step] == pytest.approx(first.losses[step], rel=LIMIT)
    found = verify_checkpoints(RUN)
    assert [each.step for each in found] == [6, 4, 2] and not any(each.faults for each in found)
    assert not _holds_secret(home), "no log, metric or picture holds the credentials"
    assert SECRET_KEY not in first.stderr + again.stderr


def test_dataset_is_prepared_into_an_object_store_and_trained_from_it(home, address):
    corpus, near, far = home / "corpus", home / "tokens", f"s3://{BUCKET}/tokens"
    corpus.mkdir()
    for index in range(12):
        (corpus / f"{index}.txt").write_text(f"the text of file {index}, " * 40)
    open_session(address)
    try:
        made = [_prepare(corpus, out) for out in (str(near), far)]
    finally:
        close_session()
    assert made[0].meta == made[1].meta and made[1].uri == far
    for name in open_store(far).list(""):
        assert open_store(far).get(name) == (near / name).read_bytes()
    assert _prepare(corpus, far).is_cached
    run = train(
        *_settings("run.name=tokens", "run.steps=2", "model.vocab_size=264", f"data.path={far}"),
        address=address,
    )
    assert run.code == 0, run.stderr
    assert len(run.losses) == 2
    # beside the folder of each dataset is the count of fetched bytes
    (copy,) = (each for each in (home / ".raymega" / "cache").iterdir() if each.is_dir())
    assert sorted(path.name for path in copy.rglob("*.arrow")) == ["000000.arrow"] * 2


@pytest.mark.parametrize("kind", ["prepared", "megatron"])
def test_streamed_run_resumed_on_another_grid_sees_the_samples_of_a_local_one(home, address, kind):
    """Losses are equal: bit for bit on one grid, and to rounding on the other."""
    near, far, more = home / f"{kind}-near", f"s3://{BUCKET}/{kind}-far", ["model.vocab_size=264"]
    made = near / "made"
    made.mkdir(parents=True)
    write_dataset(made, train=(900, 700, 800), valid=(100,), vocab_size=264, most=260)
    paths = {"near": str(made), "far": far}
    if kind == "megatron":
        export_megatron(str(made), str(near / "text"), split="train", on_progress=lambda *_: None)
        paths = {"near": f"megatron:{near}/text", "far": f"megatron:{far}/text"}
        more.append("run.eval_samples=0")
    folder = near if kind == "megatron" else made
    for path in folder.rglob("*.*"):
        name = path.relative_to(folder).as_posix()
        open_store(far).put(name, [path.read_bytes()], overwrite=False)

    def run(place, *grid):
        settings = _settings(f"run.name={kind}-{place}", f"data.path={paths[place]}", *more, *grid)
        outcome = train(*settings, address=address)
        assert outcome.code == 0, outcome.stderr
        return outcome

    local, first = run("near"), run("far")
    assert first.losses == local.losses and len(local.losses) == 6
    store = open_store(f"{RUN.removesuffix('/verify')}/{kind}-far")
    store.delete(first.events[-1]["checkpoint_uri"].removeprefix(f"{store.uri}/"))
    again = run("far", "parallel.pp=1", "parallel.dp=2")
    assert [event["step"] for event in again.all("step")] == [5, 6]
    for step in (5, 6):
        assert again.losses[step] == pytest.approx(local.losses[step], rel=LIMIT)


def _prepare(corpus, out):
    options = PrepareOptions(
        inputs=(str(corpus),), out=out, tokenizer="bytes", valid_fraction=0.3, address="local"
    )
    return prepare(options, on_progress=lambda *_: None)


def _holds_secret(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return [path for path in files if SECRET_KEY.encode() in path.read_bytes()]
