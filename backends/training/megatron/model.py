"""The frozen base model, divided among ranks: this one's part of it.

Shapes: T tokens of a packed row, E hidden size, V vocabulary, v of them on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from megatron.bridge import AutoBridge
from megatron.bridge.models.conversion.param_mapping import AutoMapping
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from backends.batching.attention import AttentionPlan
from backends.batching.recompute import Recompute, current
from backends.lora.adapter import UNEMBED, Target
from backends.lora.linear import Segments
from backends.lora.parts import Part
from backends.model import UnsupportedModelError, eos_token_ids, refuse_partial_attention
from backends.training.megatron import qwen3_moe
from backends.training.megatron.experts import adapt_experts
from backends.training.megatron.fused import Fused, even_slice, fused_layers
from backends.training.megatron.linear import adapt_column, adapt_row
from backends.training.megatron.parallel import Parallel, refuse_sizes
from backends.training.megatron.settings import RouterDtype, settings
from backends.training.megatron.spec import RMSNorm, block_spec, by_group, in_blocks, is_sparse
from backends.training.shares import Share

AutoMapping.register_module_type(RMSNorm.__name__, "replicated")


class MegatronModel:
    """A pipeline stage's layers, of which this rank has its tensor-parallel part."""

    def __init__(
        self,
        bridge: AutoBridge,
        provider: GPTModelProvider,
        config: PretrainedConfig,
        eos: tuple[int, ...],
    ) -> None:
        self._bridge = bridge
        self._config = config
        self._provider = provider
        self._segments = Segments()
        self.eos_token_ids = eos
        [self.gpt] = provider.provide_distributed_model(
            wrap_with_ddp=False,
            use_cpu_initialization=not torch.cuda.is_available(),
            mixed_precision_wrapper=None,
        )
        self.gpt.requires_grad_(False).eval()
        self.tensor_group = parallel_state.get_tensor_model_parallel_group()
        self._fused = self._all_fused()
        self._adapt()
        self._recompute = Recompute(self.gpt.decoder.layers, self._segments)
        self._rotary = self.gpt.rotary_pos_emb(self.max_context_length)  # [L, 1, 1, D]

    @classmethod
    def load(
        cls,
        path: str | Path,
        dtype: torch.dtype,
        device: torch.device,
        parallel: Parallel,
        router_dtype: RouterDtype = "float32",
    ) -> MegatronModel:
        """In every process of the default group; a GPU must be the current one. Raises
        UnsupportedModelError, or OSError when the folder holds no model."""
        if device.type == "cpu" and torch.cuda.is_available():
            raise UnsupportedModelError("Megatron computes on the GPUs of a machine that has some")
        config = AutoConfig.from_pretrained(path)
        refuse_partial_attention(config)
        experts = getattr(config, "num_experts", None) and config.model_type != qwen3_moe.MODEL_TYPE
        if experts or not AutoBridge.supports(config):
            raise UnsupportedModelError(f"{config.model_type}: not a model this trainer knows")
        refuse_sizes(config, parallel)
        bridge = AutoBridge.from_hf_pretrained(path, torch_dtype=dtype)
        provider = bridge.to_megatron_provider()
        if provider.position_embedding_type != "rope":
            kind = provider.position_embedding_type
            raise UnsupportedModelError(f"{config.model_type}: {kind} embeddings of positions")
        for name, value in settings(parallel, dtype, router_dtype).items():
            setattr(provider, name, value)
        provider.transformer_layer_spec = block_spec
        provider.finalize()
        provider.initialize_model_parallel(seed=0)
        return cls(bridge, provider, config, eos_token_ids(path, config))

    @property
    def name(self) -> str:
        """What the model was loaded from."""
        return self._config.name_or_path or self._config.model_type

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    @property
    def max_context_length(self) -> int:
        return self._config.max_position_embeddings

    @cached_property
    def targets(self) -> tuple[Target, ...]:
        """Of the whole model, with the original's names, in its order."""
        layers = [target for fused in self._fused for each in fused for target in each.targets]
        hidden = self._provider.hidden_size
        return (*layers, Target(UNEMBED, "unembed", hidden, self.vocab_size))

    @property
    def groups(self) -> tuple[str, ...]:
        return ("attn", "mlp", "unembed")

    @property
    def device(self) -> torch.device:
        return self._rotary.device

    @property
    def dtype(self) -> torch.dtype:
        return self._provider.params_dtype

    @cached_property
    def num_parameters(self) -> int:
        """Of the whole model."""
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(self._config).num_parameters()

    @property
    def num_bytes(self) -> int:
        """What this rank has of them."""
        return sum(p.nbytes for p in self.gpt.parameters())

    @property
    def shares(self) -> dict[str, Share]:
        """What this rank has of the targets, by name."""
        rank, size = self.tensor_group.rank(), self.tensor_group.size()
        shares = {
            name: share
            for _, fused in self._own_layers()
            for each in fused
            for name, share in each.shares(rank, size)
        }
        if self.gpt.post_process:
            outputs = even_slice(self.vocab_size, rank, size)
            shares[UNEMBED] = Share((0, self._provider.hidden_size), outputs)
        return shares

    @cached_property
    def head_weight(self) -> Tensor:
        """[v, E] of the last stage."""
        tied = self.gpt.share_embeddings_and_output_weights
        weight = (
            self.gpt.shared_embedding_or_output_weight() if tied else self.gpt.output_layer.weight
        )
        return weight.detach()

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        segments: Sequence[Part],
        plan: AttentionPlan,
        *,
        recompute: bool = False,
    ) -> Tensor:
        """This stage's layers over tokens[T] at positions[T] of their own sequences. The last
        stage gives hidden states [T, E], whole on every tensor-parallel rank; others what the
        pipeline sends on. What comes from the stage before is set by `gpt.set_input_tensor`."""
        gpt, start = self.gpt, None
        if gpt.pre_process:
            start = gpt.embedding(input_ids=tokens[None], position_ids=positions[None])
            if torch.is_grad_enabled():
                # The backward goes through all layers, whichever have adapters: other ranks may
                # wait for what experts send back, and by what reaches a stage's end the pipeline
                # knows that a microbatch is over.
                start.requires_grad_()
        with current(self._segments, segments), self._recompute.turned(recompute):
            out = gpt.decoder(
                hidden_states=start, attention_mask=plan, rotary_pos_emb=self._rotary[positions]
            )
        return self._whole(out)[:, 0] if gpt.post_process else out

    @property
    def token_multiple(self) -> int:
        """What T must be a multiple of."""
        return self.tensor_group.size() if self._provider.sequence_parallel else 1

    def stage_input(self, num_tokens: int) -> Tensor:
        """Zeros in place of what the stage before would send."""
        rows, hidden = num_tokens // self.token_multiple, self._provider.hidden_size
        shape = (rows, 1, hidden)
        return torch.zeros(shape, dtype=self.dtype, device=self.device, requires_grad=True)

    def _whole(self, hidden: Tensor) -> Tensor:
        """For the head, which is divided by the vocabulary: its gradients are summands."""
        if self._provider.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden, group=self.tensor_group)
        return copy_to_tensor_model_parallel_region(hidden, group=self.tensor_group)

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """The whole model again, by the original's names, on all ranks, each of which must go
        through all of it."""
        with self._in_megatrons_order():
            yield from self._bridge.export_hf_weights([self.gpt], cpu=True, show_progress=False)

    def _all_fused(self) -> list[list[Fused]]:
        registry = self._bridge._model_bridge.mapping_registry()
        return [
            fused_layers(self._provider, registry, layer, sparse=sparse)
            for layer, sparse in enumerate(is_sparse(self._provider))
        ]

    def _own_layers(self) -> Iterator[tuple[nn.Module, list[Fused]]]:
        """Without what belongs to experts of other ranks."""
        for layer in self.gpt.decoder.layers:
            fused = self._fused[layer.layer_number - 1]
            own = layer.mlp.local_expert_indices if isinstance(layer.mlp, MoELayer) else ()
            yield layer, [each for each in fused if each.expert is None or each.expert in own]

    def _adapt(self) -> None:
        self._reorder(in_blocks)
        num_ranks = self.tensor_group.size()
        for layer, fused in self._own_layers():
            of_experts = [each for each in fused if each.expert is not None]
            if of_experts:
                adapt_experts(layer.mlp, of_experts, self._segments)
            for each in fused[: len(fused) - len(of_experts)]:
                module: Any = layer.get_submodule(each.path)
                if each.column:
                    sizes = [(t.name, t.out_features // num_ranks) for t in each.targets]
                    adapt_column(module, sizes, self._segments)
                else:
                    adapt_row(module, each.targets[0].name, self._segments)

    @contextmanager
    def _in_megatrons_order(self) -> Generator[None]:
        self._reorder(by_group)
        try:
            yield
        finally:
            self._reorder(in_blocks)

    def _reorder(self, order: Callable[[Tensor, int, int], Tensor]) -> None:
        for layer in self.gpt.decoder.layers:
            attention = layer.self_attention
            heads = attention.num_attention_heads_per_partition
            for parameter in attention.linear_qkv.parameters():
                groups = attention.num_query_groups_per_partition
                parameter.data = order(parameter.data, groups, heads)
