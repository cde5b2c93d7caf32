"""Language models of transformers with `labels` among the inputs: decoders, and encoders with decoders."""

from __future__ import annotations

from typing import Any

import torch
from foreign.case import case
from foreign.huggingface import LENGTH, WORDS, causal, hugging_face, translated
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils.output_capturing import OutputRecorder, capture_outputs, maybe_install_capturing_hooks
from workloads import WIDTH, workload

OLD = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "use_cache": False, "vocab_size": WORDS}
NEW = {
    **OLD,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "attention_dropout": 0.0,
}
GROUPED = {**NEW, "num_key_value_heads": 1, "head_dim": 8}
LLAMA = "model.embed_tokens model.layers.* model.norm lm_head"
GPT2 = {
    **OLD,
    "n_positions": 32,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
}

hugging_face("GPT-2", "GPT2LMHeadModel", "transformer.wte transformer.h.* lm_head", causal, **GPT2)
hugging_face(
    "GPT-2, eager attention",
    "GPT2LMHeadModel",
    "transformer.wte transformer.h.* lm_head",
    causal,
    attn_implementation="eager",
    usual=False,
    **GPT2,
)
hugging_face(
    "GPT-2, untied",
    "GPT2LMHeadModel",
    "transformer.wte transformer.h.* lm_head",
    causal,
    tie_word_embeddings=False,
    usual=False,
    **GPT2,
)
hugging_face("Llama", "LlamaForCausalLM", LLAMA, causal, **GROUPED)
hugging_face(
    "Llama, its hidden states in the loss",
    "LlamaForCausalLM",
    LLAMA,
    causal,
    loss=lambda output, _: output.loss + sum(each.square().mean() for each in output.hidden_states),
    output_hidden_states=True,
    **GROUPED,
)
hugging_face(
    "Llama, attentions of its layers in the loss",
    "LlamaForCausalLM",
    LLAMA,
    causal,
    loss=lambda output, _: output.loss + output.attentions[0].square().mean(),
    refusal="collects 'attentions'",
    output_attentions=True,
    attn_implementation="eager",
    **GROUPED,
)


def states_in_loss(output: Any, _: Any) -> torch.Tensor:
    """Each counts unlike the others."""
    states = enumerate(output.hidden_states, start=1)
    return output.loss + sum(n * each.square().mean() for n, each in states)


def hooks_behind(model: Any) -> None:
    """Layers whose hooks come when transformers' own are there."""
    maybe_install_capturing_hooks(model.model)
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _, __, output: output * 1.5)


hugging_face(
    "Llama, its hidden states beside hooks of one's own before the forward",
    "LlamaForCausalLM",
    LLAMA,
    causal,
    loss=states_in_loss,
    prepare=lambda model: model.model.layers[0].register_forward_pre_hook(lambda _, given: (given[0] * 1.5,)),
    refusal="forward pre-hook may change",
    output_hidden_states=True,
    **GROUPED,
)


class Peak(nn.Module):
    """The largest number that comes by."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def look(self, _: Any, given: Any, *output: Any) -> None:
        """Before a forward or behind it."""
        seen = [*output, *given]
        if not isinstance(seen[0], torch.Tensor):
            return
        self.seen.copy_(torch.maximum(self.seen, seen[0].detach().abs().max()))


def looked_at(model: Any) -> None:
    """The first layer has a hook before its forward and one behind transformers' own, which change nothing."""
    maybe_install_capturing_hooks(model.model)
    layer = model.model.layers[0]
    layer.peak = Peak()
    layer.register_forward_pre_hook(layer.peak.look)
    layer.register_forward_hook(layer.peak.look)


hugging_face(
    "Llama, its hidden states beside hooks that only look",
    "LlamaForCausalLM",
    LLAMA,
    causal,
    loss=states_in_loss,
    prepare=looked_at,
    output_hidden_states=True,
    **GROUPED,
)
hugging_face(
    "Llama, its hidden states before hooks of one's own",
    "LlamaForCausalLM",
    LLAMA,
    causal,
    loss=states_in_loss,
    prepare=hooks_behind,
    refusal="hook registered behind",
    output_hidden_states=True,
    **GROUPED,
)
hugging_face(
    "Llama, its hidden states behind hooks of one's own",
    "LlamaForCausalLM",
    LLAMA,
    causal,
    loss=states_in_loss,
    prepare=lambda model: model.model.layers[1].register_forward_hook(lambda _, __, output: output * 1.5),
    output_hidden_states=True,
    **GROUPED,
)


class PairConfig(PreTrainedConfig):
    """Of `Pairs`."""

    model_type = "pairs"


class Pair(nn.Linear):
    """Returns two tensors."""

    def forward(self, x):
        return super().forward(x).tanh(), x * 2


class Pairs(PreTrainedModel):
    """Collects what `BaseModelOutput` has no field for."""

    config_class = PairConfig
    _can_record_outputs = {"hidden_states": Pair, "seconds": OutputRecorder(Pair, index=1)}  # noqa: RUF012 - as they do

    def __init__(self, config):
        super().__init__(config)
        self.layers, self.head = nn.ModuleList(Pair(WIDTH, WIDTH) for _ in range(2)), nn.Linear(WIDTH, 1)
        self.post_init()

    @capture_outputs
    def forward(self, x):
        for layer in self.layers:
            x, _ = layer(x)
        return BaseModelOutput(last_hidden_state=self.head(x))


@case(
    "transformers: a model of one's own that collects more than its output has fields", refusal="cannot be put together"
)
def collecting():
    def loss(output, targets):
        seconds = sum(each.square().mean() for each in output["seconds"])
        return nn.functional.mse_loss(output.last_hidden_state, targets) + seconds

    return workload(lambda: Pairs(PairConfig(output_seconds=True)), "layers.*", "head", loss=loss)


hugging_face("Mistral", "MistralForCausalLM", LLAMA, causal, sliding_window=3, usual=False, **GROUPED)
hugging_face("Qwen2", "Qwen2ForCausalLM", LLAMA, causal, usual=False, **{**NEW, "num_key_value_heads": 1})
hugging_face("Qwen3", "Qwen3ForCausalLM", LLAMA, causal, usual=False, **GROUPED)
hugging_face("Gemma", "GemmaForCausalLM", LLAMA, causal, **GROUPED)
hugging_face("Gemma 2", "Gemma2ForCausalLM", LLAMA, causal, usual=False, **GROUPED)
hugging_face(
    "Phi",
    "PhiForCausalLM",
    "model.embed_tokens model.layers.* lm_head",
    causal,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    usual=False,
    **NEW,
)
hugging_face(
    "Phi-3",
    "Phi3ForCausalLM",
    LLAMA,
    causal,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    usual=False,
    **{**NEW, "num_key_value_heads": 1},
)
hugging_face("OLMo 2", "Olmo2ForCausalLM", LLAMA, causal, usual=False, **{**NEW, "num_key_value_heads": 1})
hugging_face("StableLM", "StableLmForCausalLM", LLAMA, causal, usual=False, **{**NEW, "num_key_value_heads": 1})
hugging_face("Cohere", "CohereForCausalLM", LLAMA, causal, usual=False, **{**NEW, "num_key_value_heads": 1})
hugging_face(
    "Mixtral",
    "MixtralForCausalLM",
    LLAMA,
    causal,
    num_local_experts=2,
    num_experts_per_tok=1,
    experts_implementation="batched_mm",
    **GROUPED,
)
hugging_face(
    "Mixtral, eager experts",
    "MixtralForCausalLM",
    LLAMA,
    causal,
    num_local_experts=2,
    num_experts_per_tok=1,
    experts_implementation="eager",
    usual=False,
    refusal="value decides|cannot be traced",
    **GROUPED,
)
hugging_face(
    "OPT",
    "OPTForCausalLM",
    "model.decoder.embed_tokens model.decoder.embed_positions model.decoder.layers.* lm_head",
    causal,
    usual=False,
    **OLD,
    hidden_size=16,
    word_embed_proj_dim=16,
    ffn_dim=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=32,
    dropout=0.0,
)
hugging_face(
    "BLOOM",
    "BloomForCausalLM",
    "transformer.word_embeddings transformer.h.* transformer.ln_f lm_head",
    causal,
    **OLD,
    hidden_size=16,
    n_layer=2,
    n_head=2,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
hugging_face(
    "Falcon",
    "FalconForCausalLM",
    "transformer.word_embeddings transformer.h.* transformer.ln_f lm_head",
    causal,
    **OLD,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
hugging_face(
    "Falcon with ALiBi",
    "FalconForCausalLM",
    "transformer.word_embeddings transformer.h.* transformer.ln_f lm_head",
    causal,
    alibi=True,
    usual=False,
    **OLD,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
hugging_face(
    "GPT-NeoX",
    "GPTNeoXForCausalLM",
    "gpt_neox.embed_in gpt_neox.layers.* gpt_neox.final_layer_norm",
    causal,
    hidden_dropout=0.0,
    usual=False,
    **NEW,
)
hugging_face(
    "GPT-Neo",
    "GPTNeoForCausalLM",
    "transformer.wte transformer.h.* lm_head",
    causal,
    usual=False,
    **OLD,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    intermediate_size=32,
    max_position_embeddings=32,
    attention_types=[[["global", "local"], 1]],
    window_size=4,
    resid_dropout=0.0,
    embed_dropout=0.0,
    attention_dropout=0.0,
)
hugging_face(
    "GPT-J", "GPTJForCausalLM", "transformer.wte transformer.h.* lm_head", causal, rotary_dim=4, usual=False, **GPT2
)
hugging_face(
    "CodeGen",
    "CodeGenForCausalLM",
    "transformer.wte transformer.h.* lm_head",
    causal,
    rotary_dim=4,
    usual=False,
    **{**GPT2, "n_head": 4, "n_ctx": 32},
)
hugging_face(
    "MPT",
    "MptForCausalLM",
    "transformer.wte transformer.blocks.* lm_head",
    causal,
    usual=False,
    **OLD,
    d_model=16,
    n_heads=2,
    n_layers=2,
    max_seq_len=32,
)
hugging_face(
    "Mamba",
    "MambaForCausalLM",
    "backbone.embeddings backbone.layers.* backbone.norm_f lm_head",
    causal,
    **OLD,
    hidden_size=16,
    num_hidden_layers=2,
    state_size=4,
)
hugging_face(
    "OpenAI GPT",
    "OpenAIGPTLMHeadModel",
    "transformer.tokens_embed transformer.h.* lm_head",
    causal,
    usual=False,
    **{**GPT2, "afn": "gelu"},
)

T5 = {
    "vocab_size": WORDS,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 2,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "use_cache": False,
}
T5_MARKS = "encoder.embed_tokens encoder.block.* decoder.embed_tokens decoder.block.* lm_head"
hugging_face("T5", "T5ForConditionalGeneration", T5_MARKS, translated, **T5)
hugging_face(
    "T5, whole encoder and decoder marked", "T5ForConditionalGeneration", "encoder decoder lm_head", translated, **T5
)
hugging_face("mT5", "MT5ForConditionalGeneration", T5_MARKS, translated, usual=False, **T5)
hugging_face("UMT5", "UMT5ForConditionalGeneration", T5_MARKS, translated, usual=False, **T5)
hugging_face(
    "LongT5",
    "LongT5ForConditionalGeneration",
    "encoder decoder lm_head",
    translated,
    local_radius=3,
    usual=False,
    refusal="cannot be traced",
    **T5,
)

BART = {
    **OLD,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 32,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
BART_MARKS = "model.encoder.layers.* model.decoder.layers.* lm_head"
hugging_face("BART", "BartForConditionalGeneration", BART_MARKS, translated, **BART)
hugging_face(
    "BART, embeddings marked as well",
    "BartForConditionalGeneration",
    f"model.encoder.embed_tokens model.decoder.embed_tokens {BART_MARKS}",
    translated,
    usual=False,
    **BART,
)
hugging_face("mBART", "MBartForConditionalGeneration", BART_MARKS, translated, usual=False, **BART)
hugging_face("Pegasus", "PegasusForConditionalGeneration", BART_MARKS, translated, usual=False, **BART)
hugging_face("Marian", "MarianMTModel", BART_MARKS, translated, usual=False, **BART)
hugging_face("Blenderbot", "BlenderbotForConditionalGeneration", BART_MARKS, translated, usual=False, **BART)
hugging_face("Blenderbot small", "BlenderbotSmallForConditionalGeneration", BART_MARKS, translated, usual=False, **BART)
hugging_face(
    "M2M100",
    "M2M100ForConditionalGeneration",
    BART_MARKS,
    translated,
    encoder_layerdrop=0.0,
    decoder_layerdrop=0.0,
    usual=False,
    **BART,
)
hugging_face("PLBart", "PLBartForConditionalGeneration", BART_MARKS, translated, usual=False, **BART)
hugging_face(
    "BigBird-Pegasus",
    "BigBirdPegasusForConditionalGeneration",
    BART_MARKS,
    translated,
    attention_type="original_full",
    usual=False,
    **BART,
)
hugging_face(
    "LED",
    "LEDForConditionalGeneration",
    "led.encoder.layers.* led.decoder.layers.* lm_head",
    translated,
    attention_window=4,
    refusal="SymBool|cannot be traced",
    max_encoder_position_embeddings=32,
    max_decoder_position_embeddings=32,
    **BART,
)
hugging_face(
    "ProphetNet",
    "ProphetNetForConditionalGeneration",
    "prophetnet.encoder.layers.* prophetnet.decoder.layers.* lm_head",
    translated,
    usual=False,
    refusal="cannot be traced",
    **OLD,
    hidden_size=16,
    encoder_ffn_dim=32,
    decoder_ffn_dim=32,
    num_encoder_layers=2,
    num_decoder_layers=2,
    num_encoder_attention_heads=2,
    num_decoder_attention_heads=2,
    max_position_embeddings=32,
    dropout=0.0,
    attention_dropout=0.0,
    activation_dropout=0.0,
    ngram=2,
)
assert LENGTH < 32
