"""Model `raymega` of lm-eval: its requests are scored by a checkpoint's weights, on any grid.

Log-likelihoods come from raymega's workers, which stay layout-invariant. Generated text comes from lm-eval's own
Hugging Face model on an export of the checkpoint: raymega has no engine for generation.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lm_eval import utils
from lm_eval.api.model import TemplateLM
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from raymega.checkpoint.tools.handle import Checkpoint
from raymega.checkpoint.tools.inspection import open_checkpoint
from raymega.convert.huggingface.exporter import hf_export
from raymega.convert.huggingface.extra_files import files_of_model, has_tokenizer
from raymega.convert.tuned.merge import whole_weights
from raymega.errors import ConfigError, Fault
from raymega.evaluate.plan import EvalOptions, plan_of
from raymega.evaluate.requests import make_request
from raymega.evaluate.scoring import OnRows, score
from raymega.plan.run_plan import RunPlan
from raymega.session import session_at

Encoded = tuple[Any, list[int], list[int]]
"""Key of a request in lm-eval's cache, tokens of its context, and tokens of its continuation."""
DEGREE = re.compile(r"([a-z]+)=?(\d+)")


class RaymegaLM(TemplateLM):
    """Checkpoint of raymega as a model of lm-eval.

    Args:
        checkpoint: Checkpoint whose weights score.
        plan: Plan of the grid that scores.
        address: Ray cluster, see ``raymega eval --address``.
        add_bos_token: Whether texts begin with the begin-of-text token; None is as the tokenizer has it.
        batch_size: Number of sequences that are generated together; scored requests share rows instead.
        on_rows: Function that is told how far a scoring is; None shows a bar.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: RunPlan,
        *,
        address: str = "auto",
        add_bos_token: bool | None = None,
        batch_size: int = 1,
        on_rows: OnRows | None = None,
    ) -> None:
        super().__init__()
        self._checkpoint, self._plan, self._address = checkpoint, plan, address
        self._add_bos_token, self._batch_size = add_bos_token, batch_size
        self._on_rows = on_rows
        self.tokenizer = load_tokenizer(checkpoint)
        self.num_tokens = 0

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: dict[str, Any] | None = None
    ) -> RaymegaLM:
        """Return the model that ``--model_args`` describes; see :func:`open_model`."""
        return cls.create_from_arg_obj(
            utils.simple_parse_args_string(arg_string), additional_config
        )

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> RaymegaLM:
        """Return the model that ``--model_args`` describes; see :func:`open_model`."""
        more = {
            name: value for name, value in (additional_config or {}).items() if value is not None
        }
        more.pop("max_batch_size", None)
        return open_model(**arg_dict, **more)

    @property
    def max_length(self) -> int:
        """Number of tokens that the model reads at once."""
        return self._plan.job.data.seq_len

    @property
    def eot_token_id(self) -> int:
        """Token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """Token before a text without context: the one that begins texts, else the one that ends them."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else int(first)

    @property
    def tokenizer_name(self) -> str:
        """Name under which lm-eval caches requests."""
        return self._checkpoint.store.uri.replace("/", "__")

    def get_model_info(self) -> dict[str, object]:
        """Return the facts that lm-eval writes beside its results."""
        manifest = self._checkpoint.manifest
        return {
            "checkpoint": f"{self._checkpoint.store.uri}/{manifest.key}",
            "checkpoint_step": manifest.step,
            "grid": dict(self._plan.grid.degrees()),
        }

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: object
    ) -> list[int]:
        """Return the tokens of a text as lm-eval's Hugging Face model cuts it."""
        if add_special_tokens is None:
            add_special_tokens = self._add_bos_token
            if string.startswith(str(self.tokenizer.decode(self.prefix_token_id))):
                add_special_tokens = False
        if add_special_tokens is None:
            return list(self.tokenizer.encode(string))
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))

    def apply_chat_template(
        self,
        chat_history: list[dict[str, str]],
        add_generation_prompt: bool = True,
    ) -> str:
        """Return a conversation as one text by the tokenizer's chat template."""
        text = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return str(text)

    def loglikelihood_rolling(
        self,
        requests: Sequence[Any],
        disable_tqdm: bool = False,
    ) -> list[float]:
        """Return the log-likelihood of each text, by windows that score each token once."""
        windows: list[Encoded] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            found = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            pairs = [utils.make_disjoint_window(pair) for pair in found]
            windows += [(None, *pair) for pair in pairs]
            owners += [number] * len(pairs)
        sums = [0.0] * len(requests)
        scored = self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm)
        for owner, (log_prob, _) in zip(owners, scored, strict=True):
            sums[owner] += log_prob
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def _loglikelihood_tokens(
        self,
        requests: Sequence[Encoded],
        disable_tqdm: bool = False,
        **_: object,
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether greedy decoding would give it."""
        if not requests:
            return []
        for key, _context, target in requests:
            if not 0 < len(target) <= self.max_length:
                raise ConfigError(_length_fault(key, len(target), self.max_length))
        asked = [
            make_request([*context, *target], len(target), seq_len=self.max_length)
            for _key, context, target in requests
        ]
        with (
            session_at(self._address),
            _bar("rows", is_off=disable_tqdm or self._on_rows is not None) as show,
        ):
            on_rows = self._on_rows or show
            scores = score(self._checkpoint, self._plan, asked, on_rows=on_rows)
        self.num_tokens += sum(request.num_targets for request in asked)
        answers = [(float(each.log_probs.sum()), bool(each.is_greedy.all())) for each in scores]
        for (key, _context, _target), answer in zip(requests, answers, strict=True):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, answer)
        return answers

    def generate_until(
        self,
        requests: Sequence[Any],
        disable_tqdm: bool = False,
    ) -> list[str]:
        """Return the generated texts: lm-eval's Hugging Face model runs an export of the checkpoint."""
        from lm_eval.models.huggingface import (
            HFLM,
        )  # it imports torch, which scores do not need here

        dtype, device = self._plan.job.precision.dtype, self._plan.job.cluster.device
        with tempfile.TemporaryDirectory(prefix="raymega-lm-eval-") as folder:
            place = Path(folder) / "model"
            with whole_weights(self._checkpoint, self._plan.job.checkpoint.init_from) as source:
                hf_export(source, place)
            model = HFLM(
                pretrained=str(place),
                tokenizer=self.tokenizer,
                dtype=dtype,
                device="cpu" if device == "cpu" else "cuda",
                batch_size=self._batch_size,
                max_length=self.max_length,
                add_bos_token=self._add_bos_token,
            )
            return list(model.generate_until(list(requests), disable_tqdm=disable_tqdm))


def open_model(  # noqa: PLR0913  # the arguments of --model_args
    checkpoint: str,
    *,
    grid: str = "",
    seq_len: int = 0,
    dtype: str = "",
    device: str = "",
    address: str = "auto",
    add_bos_token: bool | None = None,
    batch_size: int | str = 1,
) -> RaymegaLM:
    """Return a checkpoint as a model of lm-eval.

    Args:
        checkpoint: URI of a run's folder, of one of its checkpoints or of a manifest.
        grid: Degrees of the grid, such as ``tp2-pp2``; empty is one rank.
        seq_len: Number of tokens that the model reads at once; 0 is the run's.
        dtype: Number format, ``precision.dtype``; empty is the run's.
        device: ``cpu`` or ``cuda``; empty is the run's.
        address: Ray cluster, see ``raymega eval --address``.
        add_bos_token: Whether texts begin with the begin-of-text token; None is as the tokenizer has it.
        batch_size: Number of sequences that are generated together.

    Raises:
        ConfigError: The checkpoint or the grid is wrong, or there is no tokenizer.
    """
    opened = open_checkpoint(checkpoint)
    fields = {"precision.dtype": dtype, "cluster.device": device.partition(":")[0]}
    overrides = tuple(f"{field}={value}" for field, value in fields.items() if value)
    options = EvalOptions(grid=_degrees(grid), overrides=overrides, seq_len=int(seq_len))
    return RaymegaLM(
        opened,
        plan_of(opened, options),
        address=address,
        add_bos_token=add_bos_token,
        batch_size=int(batch_size) if str(batch_size).isdecimal() else 1,
    )


def load_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a checkpoint's model as transformers loads it from an export.

    Raises:
        ConfigError: The checkpoint has none, or none that ends a text.
    """
    store, manifest = checkpoint
    files = files_of_model(store, manifest)
    if not has_tokenizer(files):
        raise ConfigError(
            _tokenizer_fault(f"{store.uri} has no tokenizer, and neither has its dataset")
        )
    with tempfile.TemporaryDirectory(prefix="raymega-tokenizer-") as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            _tokenizer_fault(f"the tokenizer of {store.uri} has no token that ends a text")
        )
    return tokenizer


@contextmanager
def _bar(what: str, *, is_off: bool) -> Iterator[Any]:
    with tqdm(desc=what, disable=is_off) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show


def _degrees(grid: str) -> str:
    """Return ``tp2-pp2`` as ``tp=2,pp=2``; other spellings stay, for the rules of a job to refuse."""
    pairs = [DEGREE.fullmatch(part) for part in grid.split("-")]
    return ",".join(f"{pair[1]}={pair[2]}" if pair else grid for pair in pairs) if grid else ""


def _length_fault(key: object, length: int, most: int) -> Fault:
    shown = repr(key)
    return Fault(
        fact=f"a continuation of {length} tokens: {shown[:80]}",
        rule=f"it must have one token at least, and {most} at most, which the model reads at once",
        remedy="correct doc_to_target or doc_to_choice of the task, or give a larger seq_len in --model_args",
    )


def _tokenizer_fault(fact: str) -> Fault:
    return Fault(
        fact=fact,
        rule="lm-eval cuts a task's text into the model's tokens",
        remedy="evaluate a checkpoint of a run whose dataset has a tokenizer, or of an imported model",
    )
