"""Language models of Hugging Face, a few thousand random weights each."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.support.models import Trained

__all__ = ["BERT", "GPT2", "T5", "LanguageModel", "Llama", "LoRA"]

VOCABULARY, LENGTH = 48, 12


class LanguageModel(Trained):
    """Learns sequences of twelve tokens out of 48, and writes some in validation.

    Args:
        checkpointed: ``"reentrant"``, ``"not reentrant"`` or ``None``.
        arguments: See :class:`~tests.support.models.Trained`.
    """

    def __init__(self, *, checkpointed: str | None = None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.network = self.make_network()
        if checkpointed is not None:
            self.network.gradient_checkpointing_enable({"use_reentrant": checkpointed == "reentrant"})
            self.network.enable_input_require_grads()  # reentrant checkpoints want an input with a gradient

    def make_network(self) -> Any:
        raise NotImplementedError

    def inputs(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.randint(3, VOCABULARY, (count, LENGTH), generator=generator)

    def output(self, tokens: Tensor) -> Any:
        """Of the network, with its loss."""
        return self.network(input_ids=tokens, labels=tokens)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.output(batch[0]).loss
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        tokens = batch[0]
        loss = self.output(tokens).loss
        written = self.network.generate(
            tokens[:, :4], attention_mask=torch.ones_like(tokens[:, :4]), max_new_tokens=4, num_beams=2, pad_token_id=0
        )
        self.notes.append((loss.item(), written.tolist()))
        self.log("validation_loss", loss, sync_dist=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self._data(8, seed=2), batch_size=self.batch_size)


class GPT2(LanguageModel):
    """The last layer is the embedding of the tokens."""

    def make_network(self) -> Any:
        config = GPT2Config(
            vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2
        )
        return GPT2LMHeadModel(config)


class Llama(LanguageModel):
    """With grouped queries, and tied to its embedding as small Llamas are."""

    def make_network(self) -> Any:
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
            tie_word_embeddings=True,
        )
        return LlamaForCausalLM(config)


class T5(LanguageModel):
    """One embedding for encoder, decoder and the last layer; positions are learned by each stack's first layer."""

    def make_network(self) -> Any:
        config = T5Config(
            vocab_size=VOCABULARY,
            d_model=16,
            d_kv=8,
            d_ff=24,
            num_layers=2,
            num_heads=2,
            decoder_start_token_id=0,
            tie_word_embeddings=True,
        )
        return T5ForConditionalGeneration(config)


class BERT(LanguageModel):
    """Fills in what is masked, with the embedding as the last layer; there is nothing to write in validation."""

    def make_network(self) -> Any:
        config = BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=LENGTH,
        )
        return BertForMaskedLM(config)

    def output(self, tokens: Tensor) -> Any:
        masked = torch.zeros_like(tokens, dtype=torch.bool)
        masked[:, ::3] = True
        padding = tokens.new_ones(tokens.shape)
        padding[0, -2:] = 0
        return self.network(
            input_ids=tokens.masked_fill(masked, 1), attention_mask=padding, labels=tokens.masked_fill(~masked, -100)
        )

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        output = self.output(batch[0])
        self.notes.append((output.loss.item(), output.logits.argmax(-1).tolist()))
        self.log("validation_loss", output.loss, sync_dist=True)


class LoRA(GPT2):
    """Two small matrices beside each frozen one; in validation they are merged into it, and taken out again.

    Args:
        saves_at: The step after which the adapter's weights are noted.
        arguments: See :class:`LanguageModel`.
    """

    def __init__(self, *, saves_at: int = 5, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.saves_at = saves_at

    def make_network(self) -> Any:
        config = LoraConfig(
            r=2, lora_alpha=4, lora_dropout=0.1, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True
        )
        return get_peft_model(super().make_network(), config)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step == self.saves_at:
            self.notes.append({name: value.clone() for name, value in get_peft_model_state_dict(self.network).items()})

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.network.merge_adapter()
        super().validation_step(batch, batch_idx)
        self.network.unmerge_adapter()
