"""Planted mistakes: experts."""

from __future__ import annotations

from raymega.verify.layout import Layout
from tests.mutations.mutation import BALANCED, BIASED, DROPPED, EXPERTS, LAST_LOAD, Mutation

EXPERTS: tuple[Mutation, ...] = (
    Mutation(
        name="gradients of experts are summed over all replicas of attention",
        file="train/build_model.py",
        old="            whole=groups.edp, inside=groups.expert_sharers,",
        new="            whole=groups.replicas, inside=groups.expert_sharers,",
        layout=Layout(dp=2, ep=2, micro_batch_size=2),
        job=EXPERTS,
    ),
    Mutation(
        name="gradients of experts are divided by their replicas",
        file="parallel/data_parallel/grad_buffer.py",
        old="            if bucket.is_tied:\n",
        new="            if bucket.is_expert:\n"
        "                self.owned(bucket).div_(bucket.sharing.whole.size)\n"
        "            if bucket.is_tied:\n",
        layout=Layout(tp=2, dp=2, ep=2, micro_batch_size=2),
        job=EXPERTS,
    ),
    Mutation(
        name="gradients of routers are whole where the stream is not cut",
        file="parallel/core/shard_spec.py",
        old="                or tensor.serves_tokens\n",
        new="",
        layout=Layout(tp=2, micro_batch_size=2),
        job=EXPERTS,
    ),
    Mutation(
        name="gradients of routers are not summed under sequence parallelism",
        file="parallel/core/shard_spec.py",
        old="            is_partial_over_tp=sharers > 1\n",
        new="            is_partial_over_tp=sharers > 1 and not tensor.serves_tokens\n",
        layout=Layout(tp=2, sequence_parallel=True, micro_batch_size=2),
        job=EXPERTS,
    ),
    Mutation(
        name="the load that balances is that of one context-parallel rank",
        file="model/moe/router.py",
        old="        return all_reduce(torch.cat((counts, token_ids.num_counted[None])), self.micro)",
        new="        return torch.cat((counts, token_ids.num_counted[None]))",
        layout=Layout(cp=2, ep=2, micro_batch_size=2),
        job=BALANCED,
    ),
    Mutation(
        name="the bias of experts moves by one rank's load",
        file="train/step.py",
        old="    everything = all_reduce(torch.cat((mine, routing.flatten())), parts.groups.world)",
        new="    everything = torch.cat((all_reduce(mine, parts.groups.world), routing.flatten()))",
        layout=Layout(dp=2, ep=2, micro_batch_size=2),
        job=BIASED,
    ),
    Mutation(
        name="experts are cut in another order than they are dispatched",
        file="plan/layers/global_tensor.py",
        old="            offset[0] = shape[0] * experts.ep_rank",
        new="            offset[0] = shape[0] * (experts.ep - 1 - experts.ep_rank)",
        layout=Layout(dp=2, ep=2, micro_batch_size=2),
        job=EXPERTS,
    ),
    Mutation(
        name="padding is counted in the load of experts",
        file="parallel/expert_parallel/token_ids.py",
        old="        return self.is_counted.to(torch.float64)",
        new="        return torch.ones_like(self.is_counted, dtype=torch.float64)",
        layout=Layout(micro_batch_size=4),
        job=LAST_LOAD,
    ),
    Mutation(
        name="probabilities are applied on both ends where tokens are gathered",
        file="parallel/expert_parallel/dispatcher.py",
        old="        self.weights = gather_positions(weights, groups.ep)\n",
        new="        self.weights = gather_positions(weights, groups.ep).square()\n",
        layout=Layout(dp=2, ep=2, moe_token_dispatcher_type="all_gather", micro_batch_size=2),
        job=EXPERTS,
    ),
    Mutation(
        name="probabilities are applied on both ends where tokens are exchanged",
        file="parallel/expert_parallel/dispatcher.py",
        old="        return unpermute(wait_for(self.transfer), self.routing.weights, self.arrangement)",
        new="        weights = self.routing.weights.square()\n"
        "        return unpermute(wait_for(self.transfer), weights, self.arrangement)",
        layout=Layout(dp=2, ep=2, micro_batch_size=2),
        job=EXPERTS,
    ),
    Mutation(
        name="balance is lost on all micro-batches of a step but the first",
        file="model/moe/load_balancing.py",
        old="    return with_gradient(x, loss, lambda grad: grad.new_full((), record.loss_gradient, dtype=dtype))",
        new="\n    def once(grad):\n"
        "        from_loss, record.loss_gradient = record.loss_gradient, 0.0\n"
        "        return grad.new_tensor(from_loss, dtype=dtype)\n\n"
        "    return with_gradient(x, loss, once)",
        layout=Layout(dp=2, ep=2, micro_batch_size=2),
        job=BALANCED,
    ),
    Mutation(
        name="rows are not waited for after the other pass's turn",
        file="parallel/expert_parallel/overlap.py",
        old="                raise _OtherFailedError\n        pending.wait(timeout_s)",
        new="                raise _OtherFailedError\n        else:\n            pending.wait(timeout_s)",
        layout=Layout(dp=4, ep=4, overlap_moe_expert_parallel_comm=True, schedule="1f1b"),
        job=EXPERTS,
    ),
    Mutation(
        name="what experts drop goes by the order of ranks",
        file="model/moe/router.py",
        old="    order = keys.argsort(stable=True)\n",
        new="    order = torch.arange(keys.shape[0], device=keys.device)\n",
        layout=Layout(cp=2, ep=2, micro_batch_size=2),
        job=DROPPED,
    ),
    Mutation(
        name="routers learn nothing where experts are one node of autograd",
        file="model/moe/local_experts.py",
        old="        return grad_x, grad_weights, grad_up, grad_down, None, None",
        new="        return grad_x, torch.zeros_like(grad_weights), grad_up, grad_down, None, None",
        layout=Layout(dp=2, micro_batch_size=2),
        job=EXPERTS,
    ),
)
