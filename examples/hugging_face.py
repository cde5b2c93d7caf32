"""Hugging Face models made from a config, nothing downloaded: a GPT-2 and a BERT; the partitions are name patterns."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from gpt import BYTES, read_text
from torch import Tensor, nn

import assigner

os.environ["HF_HUB_OFFLINE"] = "1"  # before the import that reads it
import transformers

if TYPE_CHECKING:
    from transformers.utils import ModelOutput

transformers.logging.set_verbosity_error()

PADDING, MASK = BYTES, BYTES + 1
IGNORED = -100


def token_loss(output: ModelOutput, targets: Tensor) -> Tensor:
    """Mean cross-entropy over the tokens that have a target: of logits (rows, length, vocabulary)."""
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def token_count(_: dict[str, Tensor], targets: Tensor) -> Tensor:
    """What `token_loss` divides by: micro-batches with more targets count for more."""
    return (targets != IGNORED).sum()


def gpt2(
    *,
    blocks: int = 6,
    width: int = 128,
    heads: int = 4,
    context: int = 64,
    dropout: float = 0.1,
    attention: str = "sdpa",
    batch_size: int = 16,
    learning_rate: float = 1e-3,
    text: str = "",
    double: bool = False,
) -> assigner.Workload:
    """A GPT-2 that predicts the next byte; its head is its embedding, on whatever worker that is.

    Args:
        blocks: Transformer blocks; with embedding and head the model has `blocks + 2` partitions.
        width: Of the residual stream.
        heads: Of the attention; they share the width.
        context: Bytes that the model sees.
        dropout: Share of values that are dropped, wherever GPT-2 drops any.
        attention: "sdpa" or "eager".
        batch_size: Windows in a step.
        learning_rate: Of AdamW.
        text: A file to learn from; empty: Python's own language reference.
        double: In float64.
    """

    def model() -> nn.Module:
        config = transformers.GPT2Config(
            vocab_size=BYTES, n_positions=context, n_embd=width, n_layer=blocks, n_head=heads,
            embd_pdrop=dropout, attn_pdrop=dropout, resid_pdrop=dropout, attn_implementation=attention,
            bos_token_id=None, eos_token_id=None,
            use_cache=False,  # a cache is for generating text; in training it would carry values past the partitions
        )  # fmt: skip
        made = transformers.GPT2LMHeadModel(config)
        return made.double() if double else made

    def batch(rows: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        data = read_text(text)
        starts = torch.randint(len(data) - context, (rows, 1), generator=generator)
        windows = data[starts + torch.arange(context + 1)].long()
        return {"input_ids": windows[:, :-1]}, windows[:, 1:]

    return assigner.Workload(
        model=model,
        batch=batch,
        loss=token_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.01),
        batch_size=batch_size,
        name="gpt2",
        marks=("transformer.wte", "transformer.h.*", "lm_head"),
    )


def bert(
    *,
    layers: int = 6,
    width: int = 128,
    heads: int = 4,
    context: int = 64,
    dropout: float = 0.1,
    attention: str = "sdpa",
    batch_size: int = 16,
    learning_rate: float = 1e-3,
    text: str = "",
    double: bool = False,
) -> assigner.Workload:
    """A BERT that fills in masked bytes of texts of unequal lengths; its decoder is its embedding.

    Args:
        layers: Encoder layers; with embedding and head the model has `layers + 2` partitions.
        width: Of the hidden states.
        heads: Of the attention; they share the width.
        context: Bytes of the longest text; the shortest has a quarter of it, and the rest is padding.
        dropout: Share of values that are dropped, wherever BERT drops any.
        attention: "sdpa" or "eager".
        batch_size: Texts in a step.
        learning_rate: Of AdamW.
        text: A file to learn from; empty: Python's own language reference.
        double: In float64.
    """

    def model() -> nn.Module:
        config = transformers.BertConfig(
            vocab_size=BYTES + 2, max_position_embeddings=context, hidden_size=width, num_hidden_layers=layers,
            num_attention_heads=heads, intermediate_size=4 * width, pad_token_id=PADDING,
            hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, attn_implementation=attention,
        )  # fmt: skip
        made = transformers.BertForMaskedLM(config)
        return made.double() if double else made

    def batch(rows: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        data = read_text(text)
        starts = torch.randint(len(data) - context + 1, (rows, 1), generator=generator)
        lengths = torch.randint(context // 4, context + 1, (rows, 1), generator=generator)
        is_text = torch.arange(context) < lengths
        ids = data[starts + torch.arange(context)].long()
        draw = torch.rand(rows, context, generator=generator)
        chosen = (draw < 0.15) & is_text
        # Of the chosen bytes eight in ten are masked, one is another byte, and one stays (Devlin et al., 2019, 3.1).
        shown = torch.where(draw < 0.12, MASK, ids)
        other = torch.randint(BYTES, (rows, context), generator=generator)
        shown = torch.where((draw >= 0.12) & (draw < 0.135), other, shown).masked_fill(~is_text, PADDING)
        return {"input_ids": shown, "attention_mask": is_text.long()}, ids.masked_fill(~chosen, IGNORED)

    return assigner.Workload(
        model=model,
        batch=batch,
        loss=token_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.01),
        batch_size=batch_size,
        name="bert",
        weight=token_count,
        marks=("bert.embeddings", "bert.encoder.layer.*", "cls"),
    )
