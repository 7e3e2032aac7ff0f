"""Planted mistakes in models that read images: layouts that differ, and tests that transformers or the rows decide."""

from __future__ import annotations

from dataclasses import replace

from raymega.verify.layout import Layout
from tests.mutations.mutation import Mutation
from tests.mutations.proofs import ProofMutation

LLAVA = (
    "model.vocab_size=256", "data.packing=best_fit", "data.document_multiple=4", "data.seq_len=32", "model.max_positions=64",
    "model.vision={kind: clip, image_size: 8, patch_size: 4, num_layers: 2, hidden_size: 16, num_heads: 2, "
    "ffn_hidden_size: 32, image_token_id: 255}",
)  # fmt: skip
SEVERAL = (
    *LLAVA[:-1], "model.vision={kind: qwen2_vl, max_pixels: 384, patch_size: 4, spatial_merge_size: 2, num_layers: 2, hidden_size: 16, "
    "num_heads: 2, ffn_hidden_size: 32, feature_layer: -1, mrope_section: [0, 1, 1], image_token_id: 255}",
)  # fmt: skip
"""Images of one to six tokens."""
EMBEDDING, TOWER = "model/vision/embedding.py", "model/vision/tower.py"
ROWS, SHARE = "data/images/image_rows.py", "data/images/image_batch.py"
ROW_TESTS = "tests/unit/data/images/test_image_rows.py"
WITNESS = "tests/dist/model/test_vision.py"
LOGITS = f"{WITNESS}::test_logits_are_those_of_transformers"
STEPS = f"{WITNESS}::test_steps_are_those_of_a_plain_loop"
GATHER = "over_tp = gather_positions if sp.is_sequence_parallel else gather_rows"
CUT = Layout(tp=2, sequence_parallel=True)
CUT_TOWER = tuple(each.replace("kind: clip", "kind: clip, tensor_parallel: true") for each in LLAVA)
CHANGED = (*LLAVA, "data.augment={crop_scale: [0.3, 1.0], horizontal_flip: 0.5, brightness: 0.4}")
READS = "tests/dist/model/test_vision_reads.py"
GREEDY = f"{READS}::test_greedy_text_behind_images_is_that_of_transformers"
SCORES = f"{READS}::test_scores_of_rows_with_images_are_those_of_transformers"
AUGMENT_TESTS = "tests/unit/data/images/test_augment.py"

IMAGES: tuple[Mutation, ...] = (
    Mutation(
        name="the tower's gradient is not summed over tp",
        file="plan/layers/vision.py",
        old="serves_tokens=not is_cut",
        new="serves_tokens=False",
        layout=Layout(tp=2),
        job=LLAVA,
    ),
    Mutation(
        name="an image's gradient is that of one context-parallel rank's tokens",
        file=EMBEDDING,
        old="features = gather_positions(features, group)",
        new="features = gather_rows(features, group)",
        layout=Layout(cp=2),
        job=LLAVA,
    ),
    Mutation(
        name="tp ranks with the same tokens add their gradients of an image",
        file=EMBEDDING,
        old=GATHER,
        new="over_tp = gather_positions",
        layout=Layout(tp=2),
        job=LLAVA,
    ),
    Mutation(
        name="an image's gradient is that of its rank's own positions",
        file=EMBEDDING,
        old=GATHER,
        new="over_tp = gather_rows",
        layout=CUT,
        job=LLAVA,
    ),
    Mutation(
        name="patches lie at the places of another rank's positions",
        file=EMBEDDING,
        old="at = self.sp.own(places.t()) + 1",
        new="at = places.t()[: len(x)] + 1",
        layout=CUT,
        job=LLAVA,
    ),
    Mutation(
        name="a rank reads the images of another rank",
        file=SHARE,
        old="(self.dp_rank * self.size + self.index) * count",
        new="(self.dp_rank * self.size + self.size - 1 - self.index) * count",
        layout=Layout(cp=2),
        job=LLAVA,
    ),
    Mutation(
        name="an image is that of another row",
        file=SHARE,
        old="(own // most + first) * size + own % most",
        new="own // most * size + own % most",
        layout=Layout(dp=1, micro_batch_size=3),
        job=LLAVA,
    ),
    Mutation(
        name="images are drawn by process",
        file=ROWS,
        old='f"{self.name}/{purpose}/{sample}/{number}".encode()',
        new="f\"{self.name}/{purpose}/{sample}/{number}/{__import__('os').getpid()}\".encode()",
        layout=Layout(dp=2),
        job=LLAVA,
    ),
    Mutation(
        name="a tower reads the images of another block than it sends features of",
        file=SHARE,
        old="(self.dp_rank * self.size + self.index) * count",
        new="(self.index * self.dp + (self.dp_rank + 1) % self.dp) * count",
        layout=Layout(tp=2, dp=2, balance_images=True),
        job=LLAVA,
    ),
    Mutation(
        name="gradients of features do not come back from other dp ranks",
        file="parallel/tensor_parallel/mappings.py",
        old="lambda rows: exchanged(rows, received, sent)",
        new="lambda rows: exchanged(rows, received, sent) * 0",
        layout=Layout(dp=2, balance_images=True),
        job=LLAVA,
    ),
    Mutation(
        name="gradients of a cut tower's features are those of a rank's own positions",
        file=EMBEDDING,
        old="copy_to_tp(features, self.sp.tp) if self.sp.degree > 1 else features",
        new="features",
        layout=replace(CUT, cuts_vision_tower=True),
        job=CUT_TOWER,
    ),
    Mutation(
        name="gradients of a cut tower's norms are summed over tp",
        file="plan/layers/vision.py",
        old="serves_tokens=not is_cut",
        new="serves_tokens=True",
        layout=Layout(tp=2, cuts_vision_tower=True),
        job=CUT_TOWER,
    ),
    Mutation(
        name="shapes of images are drawn by process",
        file=ROWS,
        old='random = self._random(sample, "grids", document)',
        new="random = self._random(sample, f\"grids{__import__('os').getpid()}\", document)",
        layout=Layout(dp=2),
        job=SEVERAL,
    ),
    Mutation(
        name="an image has the grid of another one that its rank reads",
        file=EMBEDDING,
        old="features = self.tower(images.pixels, images.grids)",
        new="features = self.tower(images.pixels, images.grids.flip(0))",
        layout=Layout(tp=2),
        job=SEVERAL,
    ),
    Mutation(
        name="changes of images are drawn by process",
        file="data/images/image_rows.py",
        old='self._random(sample, "augment", number))',
        new="self._random(sample, f\"augment{__import__('os').getpid()}\", number))",
        layout=Layout(dp=2),
        job=CHANGED,
    ),
)
IMAGE_PROOFS: tuple[ProofMutation, ...] = (
    ProofMutation(
        name="an image's tokens are one place late",
        file=EMBEDDING,
        old="at = self.sp.own(places.t()) + 1",
        new="at = self.sp.own(places.t().roll(1, 0)) + 1",
        tests=(LOGITS,),
    ),
    ProofMutation(
        name="an image is that of another document",
        file=SHARE,
        old="canvas(every[begin : begin + count],",
        new="canvas(every[::-1][begin : begin + count],",
        tests=(
            LOGITS,
            f"{ROW_TESTS}::test_ranks_share_the_images_of_a_micro_batch_in_order",
        ),
    ),
    ProofMutation(
        name="labels of images count",
        file=ROWS,
        old="row.mask & (row.labels != self.vision.image_token_id)",
        new="row.mask",
        tests=(f"{ROW_TESTS}::test_labels_of_images_do_not_count_and_those_of_text_do",),
    ),
    ProofMutation(
        name="positions restart behind an image",
        file="model/pipeline_stage.py",
        old="self.rope.all_rotations(token_layout.positions)",
        new="self.rope.all_rotations(token_layout.positions if rows.images is None else "
        "token_layout.positions * (rows.images.places.t() < 0))",
        tests=(LOGITS,),
    ),
    ProofMutation(
        name="an image crosses into the next document",
        file=ROWS,
        old="self._begins(sample, number, end - begin)",
        new="self._begins(sample, number, len(tokens) - begin)",
        tests=(f"{ROW_TESTS}::test_an_image_is_whole_tokens_of_one_document",),
    ),
    ProofMutation(
        name="an image moves what follows by its tokens, not by its height",
        file="parallel/context_parallel/images.py",
        old="is_last * torch.maximum(rows, columns),",
        new="torch.ones_like(places),",
        tests=(LOGITS,),
    ),
    ProofMutation(
        name="a token rotates by its column in place of its row",
        file="parallel/context_parallel/images.py",
        old="time + patch // columns * is_image, time + patch % columns * is_image",
        new="time + patch % columns * is_image, time + patch // columns * is_image",
        tests=(LOGITS,),
    ),
    ProofMutation(
        name="patches of a square are merged by column",
        file=TOWER,
        old="cut.permute(0, 1, 3, 5, 2, 4, 6)",
        new="cut.permute(0, 1, 5, 3, 2, 4, 6)",
        tests=(LOGITS,),
    ),
    ProofMutation(
        name="patches attend to what lies behind an image on its canvas",
        file=TOWER,
        old="attn_mask=is_patch)",
        new="attn_mask=None)",
        tests=(LOGITS,),
    ),
    ProofMutation(
        name="an image has the grid of the image before it",
        file=SHARE,
        old="torch.from_numpy(grids), take(places)",
        new="torch.from_numpy(np.roll(grids, 1, 0)), take(places)",
        tests=(LOGITS,),
    ),
    ProofMutation(
        name="a patch rotates by its row and column on a canvas of one shape for all",
        file=TOWER,
        old="columns = grids[:, 1:]",
        new="columns = grids[:, 1:].max().expand(len(grids), 1)",
        tests=(LOGITS,),
    ),
    ProofMutation(
        name="positions behind an image are those of its canvas",
        file="parallel/context_parallel/images.py",
        old="is_last * torch.maximum(rows, columns),",
        new="is_last * num_patches,",
        tests=(LOGITS,),
    ),
    ProofMutation(
        name="an image moves what follows by its height, not by its longer edge",
        file="parallel/context_parallel/images.py",
        old="torch.maximum(rows, columns)",
        new="rows",
        tests=(LOGITS,),
    ),
    ProofMutation(
        name="a small image that ended before a window is one of its own",
        file="data/images/stored.py",
        old="if len(here):",
        new="if True:",
        tests=(
            "tests/unit/prepare/images/test_image_sizes.py::test_windows_that_begin_inside_an_image_have_the_rest_of_it",
        ),
    ),
    ProofMutation(
        name="the class token is projected",
        file=TOWER,
        old="x[:, int(self.vision.has_class_token) :]",
        new="x[:, : self.vision.num_patches]",
        tests=(LOGITS,),
    ),
    ProofMutation(
        name="the last block's output is projected",
        file=TOWER,
        old="self.layers[: self.vision.used_layers]",
        new="self.layers",
        tests=(LOGITS,),
    ),
    ProofMutation(
        name="patches go column by column",
        file=SHARE,
        old="transpose(1, 3, 0, 2, 4)",
        new="transpose(3, 1, 0, 2, 4).reshape(into.shape)",
        tests=(LOGITS,),
    ),
    ProofMutation(
        name="blocks behind the projected one decay",
        file="plan/layers/vision.py",
        old="replace(each, is_frozen=True) if each.name.startswith(behind) else each",
        new="each",
        tests=(STEPS,),
    ),
    ProofMutation(
        name="questions with the same words share the first one's image",
        file="evaluate/requests.py",
        old="own = (*map(id, request.images), *first)",
        new="own = first",
        tests=(SCORES,),
    ),
    ProofMutation(
        name="a request's images are those of the request before it in the row",
        file="evaluate/requests.py",
        old="own, first = request.places[:-1], len(images) * self._sizes.num_patches",
        new="own, first = request.places[:-1], max(0, len(images) - 1) * self._sizes.num_patches",
        tests=(SCORES,),
    ),
    ProofMutation(
        name="a text is scored without its end",
        file="evaluate/tasks/images.py",
        old="end = [] if tokenizer.eod_id is None or row.right >= 0 else [tokenizer.eod_id]",
        new="end = []",
        tests=(SCORES,),
    ),
    ProofMutation(
        name="a prompt continues the images of the one before it",
        file="train/sampling.py",
        old="Prompted(len(prompts[number]), images[number])",
        new="Prompted(len(prompts[number]), images[number] and images[number - 1])",
        tests=(GREEDY,),
    ),
    ProofMutation(
        name="transformers gets pixels that are not normalised",
        file="generate/image_inputs.py",
        old="torch.from_numpy(image.copy()).float() / WHITE - mean) / std",
        new="torch.from_numpy(image.copy()).float() / WHITE) + 0 * mean + 0 * std",
        tests=(GREEDY,),
    ),
    ProofMutation(
        name="NEFTune noises features of images",
        file="model/vision_stage.py",
        old="x = self.embedding_dropout(x, token_layout.keys)",
        new="x = self.embedding_dropout(self.noise(x, token_layout), token_layout.keys)",
        tests=(
            "tests/unit/model/vision/test_noise.py::test_features_of_images_have_no_noise_and_tokens_of_text_have",
        ),
    ),
    ProofMutation(
        name="images of a validation split are changed",
        file=ROWS,
        old='job.data.augment if split == "train" else AugmentSection()',
        new="job.data.augment",
        tests=(f"{AUGMENT_TESTS}::test_images_change_by_sample_alone_and_only_in_training",),
    ),
    ProofMutation(
        name="the middle is cut at the wrong side",
        file="data/images/augment.py",
        old="left=(width - own[1]) // 2",
        new="left=0",
        tests=(f"{AUGMENT_TESTS}::test_where_no_part_fits_the_middle_within_the_ratio_is_taken",),
    ),
    ProofMutation(
        name="a carried preprocessor goes along although the job has changed it",
        file="convert/huggingface/families/images/llava.py",
        old="if all({**found, **means}.get(name) == value for name, value in now.items()):",
        new="if found:",
        tests=(
            "tests/unit/convert/huggingface/test_images.py::"
            "test_a_carried_preprocessor_goes_along_unless_the_job_has_changed_what_it_says",
        ),
    ),
    ProofMutation(
        name="images that are found without their tokens are not changed",
        file="data/samples.py",
        old="return rule.changed(source.images_in(window), sample)",
        new="return source.images_in(window)",
        tests=(
            "tests/unit/prepare/images/test_image_rows.py::test_images_of_a_row_are_found_without_its_tokens",
        ),
    ),
    ProofMutation(
        name="the first stage beside a tower has one layer",
        file="plan/stages.py",
        old="counts[max(0, at - 1) : at + 1]",
        new="counts[:1]",
        tests=(
            "tests/unit/plan/layers/test_vision.py::test_no_other_split_beside_a_tower_has_a_cheaper_dearest_stage",
        ),
    ),
    ProofMutation(
        name="a cut tower's sums are free in backward",
        file="planner/cost/end_times.py",
        old="2 * forward + sums + repeated",
        new="2 * forward + repeated",
        tests=(
            "tests/unit/planner/cost/test_tensor_parallel_time.py::"
            "test_a_tower_that_tp_cuts_sums_each_block_twice_in_each_pass",
        ),
    ),
)
