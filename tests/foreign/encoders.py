"""Other models of transformers with `labels` among the inputs: encoders, vision, speech, two towers."""

from __future__ import annotations

import torch
import transformers
from foreign.case import case
from foreign.huggingface import LENGTH, TOLERANCE, WORDS, answered, classified, hugging_face, ids, masked, tagged
from workloads import sgd

from assigner.model.workload import Workload

BERT = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "pad_token_id": 0,
}
THREE = {**BERT, "num_labels": 3}

hugging_face("BERT, masked words", "BertForMaskedLM", "bert.embeddings bert.encoder.layer.* cls", masked, **BERT)
hugging_face(
    "BERT, classes",
    "BertForSequenceClassification",
    "bert.embeddings bert.encoder.layer.* bert.pooler classifier",
    classified,
    **THREE,
)
hugging_face(
    "BERT, a class for each token",
    "BertForTokenClassification",
    "bert.embeddings bert.encoder.layer.* classifier",
    tagged,
    usual=False,
    **THREE,
)
hugging_face(
    "BERT, answers",
    "BertForQuestionAnswering",
    "bert.embeddings bert.encoder.layer.* qa_outputs",
    answered,
    usual=False,
    **BERT,
)
hugging_face(
    "BERT, masked words, eager attention",
    "BertForMaskedLM",
    "bert.embeddings bert.encoder.layer.* cls",
    masked,
    attn_implementation="eager",
    usual=False,
    **BERT,
)
hugging_face(
    "RoBERTa", "RobertaForMaskedLM", "roberta.embeddings roberta.encoder.layer.* lm_head", masked, usual=False, **BERT
)
hugging_face(
    "XLM-RoBERTa",
    "XLMRobertaForSequenceClassification",
    "roberta.embeddings roberta.encoder.layer.* classifier",
    classified,
    usual=False,
    **THREE,
)
hugging_face(
    "CamemBERT",
    "CamembertForMaskedLM",
    "roberta.embeddings roberta.encoder.layer.* lm_head",
    masked,
    usual=False,
    **BERT,
)
hugging_face(
    "DistilBERT",
    "DistilBertForMaskedLM",
    "distilbert.embeddings distilbert.transformer.layer.* vocab_projector",
    masked,
    usual=False,
    vocab_size=WORDS,
    dim=16,
    n_layers=2,
    n_heads=2,
    hidden_dim=32,
    max_position_embeddings=32,
    dropout=0.0,
    attention_dropout=0.0,
)
hugging_face(
    "ELECTRA",
    "ElectraForMaskedLM",
    "electra.embeddings electra.encoder.layer.* generator_lm_head",
    masked,
    usual=False,
    embedding_size=16,
    **BERT,
)
hugging_face(
    "ELECTRA, discriminator",
    "ElectraForPreTraining",
    "electra.embeddings electra.encoder.layer.* discriminator_predictions",
    lambda rows, generator: ({**tagged(rows, generator)[0], "labels": ids(rows, generator) % 2}, None),
    embedding_size=16,
    usual=False,
    **BERT,
)
hugging_face(
    "ALBERT", "AlbertForMaskedLM", "albert.embeddings albert.encoder predictions", masked, embedding_size=16, **BERT
)
hugging_face(
    "DeBERTa",
    "DebertaForMaskedLM",
    "deberta.embeddings deberta.encoder.layer.*",
    masked,
    type_vocab_size=0,
    usual=False,
    **BERT,
)
hugging_face(
    "DeBERTa v2 with relative positions",
    "DebertaV2ForSequenceClassification",
    "deberta.embeddings deberta.encoder.layer.* classifier",
    classified,
    relative_attention=True,
    pos_att_type=["p2c", "c2p"],
    type_vocab_size=0,
    pooler_dropout=0.0,
    pooler_hidden_size=16,
    refusal="cannot be traced",
    **THREE,
)
hugging_face("MPNet", "MPNetForMaskedLM", "mpnet.embeddings mpnet.encoder.layer.* lm_head", masked, usual=False, **BERT)
hugging_face(
    "LayoutLM",
    "LayoutLMForMaskedLM",
    "layoutlm.embeddings layoutlm.encoder.layer.* cls",
    masked,
    max_2d_position_embeddings=32,
    usual=False,
    **BERT,
)
hugging_face(
    "Funnel",
    "FunnelForMaskedLM",
    "funnel.embeddings funnel.encoder funnel.decoder lm_head",
    masked,
    vocab_size=WORDS,
    block_sizes=[1, 1],
    d_model=16,
    n_head=2,
    d_head=8,
    d_inner=32,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    activation_dropout=0.0,
    num_decoder_layers=1,
    usual=False,
)
hugging_face(
    "SqueezeBERT",
    "SqueezeBertForMaskedLM",
    "transformer.embeddings transformer.encoder cls",
    masked,
    embedding_size=16,
    q_groups=2,
    k_groups=2,
    v_groups=2,
    post_attention_groups=1,
    intermediate_groups=2,
    output_groups=2,
    usual=False,
    **BERT,
)
hugging_face(
    "Longformer",
    "LongformerForMaskedLM",
    "longformer.embeddings longformer.encoder.layer.* lm_head",
    masked,
    attention_window=4,
    refusal="traced|value",
    usual=False,
    **BERT,
)
hugging_face(
    "ModernBERT",
    "ModernBertForMaskedLM",
    "model.embeddings model.layers.* head decoder",
    masked,
    vocab_size=WORDS,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=32,
    local_attention=4,
    pad_token_id=0,
    attn_implementation="sdpa",
)
NYSTROM = {
    **THREE, "num_landmarks": 3, "segment_means_seq_len": LENGTH, "eos_token_id": 2, "bos_token_id": 1
}  # fmt: skip


def all_seen(rows, generator):
    """A text without padding, with a mask that says so, and its class."""
    inputs, _ = classified(rows, generator)
    return {**inputs, "attention_mask": torch.ones(rows, LENGTH)}, None


def seen_by_form(rows, generator):
    """The same, with a mask of the form that its layers take."""
    inputs, _ = classified(rows, generator)
    return {**inputs, "attention_mask": torch.zeros(rows, 1, 1, LENGTH, dtype=torch.float64)}, None


hugging_face(
    "Nystromformer, whose layers take no mask of transformers' own",
    "NystromformerForSequenceClassification",
    "nystromformer.encoder.layer.*",
    all_seen,
    refusal="attention_mask of four dimensions",
    usual=False,
    **NYSTROM,
)
hugging_face(
    "Nystromformer, given a mask of four dimensions",
    "NystromformerForSequenceClassification",
    "nystromformer.encoder.layer.*",
    seen_by_form,
    usual=False,
    **NYSTROM,
)


@case("transformers: BERT, nothing masked, NumPy reads what its layers make", tolerance=TOLERANCE)
def read_by_numpy():
    def build():
        cls = transformers.BertForSequenceClassification
        model = cls._from_config(cls.config_class(**THREE), dtype=torch.float64)
        for layer in model.bert.encoder.layer:
            layer.register_forward_hook(lambda _, __, output: output.detach().numpy().mean() and None)
        return model

    marks = ("bert.embeddings", "bert.encoder.layer.*", "classifier")
    return Workload(build, all_seen, lambda output, _: output.loss, sgd, 8, marks=marks, seed=5, name="test")
