"""Other models of transformers with `labels` among the inputs: encoders, vision, speech, two towers."""

from __future__ import annotations

import torch
from foreign.huggingface import LENGTH, WORDS, answered, classified, hugging_face, ids, masked, pictures, tagged

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
    **THREE,
)
hugging_face(
    "BERT, answers", "BertForQuestionAnswering", "bert.embeddings bert.encoder.layer.* qa_outputs", answered, **BERT
)
hugging_face(
    "BERT, masked words, eager attention",
    "BertForMaskedLM",
    "bert.embeddings bert.encoder.layer.* cls",
    masked,
    attn_implementation="eager",
    **BERT,
)
hugging_face("RoBERTa", "RobertaForMaskedLM", "roberta.embeddings roberta.encoder.layer.* lm_head", masked, **BERT)
hugging_face(
    "XLM-RoBERTa",
    "XLMRobertaForSequenceClassification",
    "roberta.embeddings roberta.encoder.layer.* classifier",
    classified,
    **THREE,
)
hugging_face("CamemBERT", "CamembertForMaskedLM", "roberta.embeddings roberta.encoder.layer.* lm_head", masked, **BERT)
hugging_face(
    "DistilBERT",
    "DistilBertForMaskedLM",
    "distilbert.embeddings distilbert.transformer.layer.* vocab_projector",
    masked,
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
    embedding_size=16,
    **BERT,
)
hugging_face(
    "ELECTRA, discriminator",
    "ElectraForPreTraining",
    "electra.embeddings electra.encoder.layer.* discriminator_predictions",
    lambda rows, generator: ({**tagged(rows, generator)[0], "labels": ids(rows, generator) % 2}, None),
    embedding_size=16,
    **BERT,
)
hugging_face(
    "ALBERT", "AlbertForMaskedLM", "albert.embeddings albert.encoder predictions", masked, embedding_size=16, **BERT
)
hugging_face(
    "DeBERTa", "DebertaForMaskedLM", "deberta.embeddings deberta.encoder.layer.*", masked, type_vocab_size=0, **BERT
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
    **THREE,
)
hugging_face("MPNet", "MPNetForMaskedLM", "mpnet.embeddings mpnet.encoder.layer.* lm_head", masked, **BERT)
hugging_face(
    "LayoutLM",
    "LayoutLMForMaskedLM",
    "layoutlm.embeddings layoutlm.encoder.layer.* cls",
    masked,
    max_2d_position_embeddings=32,
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
)
hugging_face(
    "XLNet",
    "XLNetLMHeadModel",
    "transformer.word_embedding transformer.layer.* lm_loss",
    tagged,
    vocab_size=WORDS,
    d_model=16,
    n_layer=2,
    n_head=2,
    d_inner=32,
    dropout=0.0,
)
hugging_face(
    "SqueezeBERT",
    "SqueezeBertForMaskedLM",
    "transformer.embeddings transformer.encoder.layers.* cls",
    masked,
    embedding_size=16,
    q_groups=2,
    k_groups=2,
    v_groups=2,
    post_attention_groups=1,
    intermediate_groups=2,
    output_groups=2,
    **BERT,
)
hugging_face(
    "Longformer",
    "LongformerForMaskedLM",
    "longformer.embeddings longformer.encoder.layer.* lm_head",
    masked,
    attention_window=4,
    refusal="traced|value",
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

VIT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "image_size": 8,
    "patch_size": 4,
    "num_labels": 3,
}
hugging_face("ViT", "ViTForImageClassification", "vit.embeddings vit.layers.* classifier", pictures, **VIT)
hugging_face("DeiT", "DeiTForImageClassification", "deit.embeddings deit.layers.* classifier", pictures, **VIT)
hugging_face(
    "BEiT",
    "BeitForImageClassification",
    "beit.embeddings beit.layers.* classifier",
    pictures,
    drop_path_rate=0.0,
    **VIT,
)
hugging_face(
    "DINOv2",
    "Dinov2ForImageClassification",
    "dinov2.embeddings dinov2.encoder.layer.* classifier",
    pictures,
    drop_path_rate=0.0,
    **VIT,
)
hugging_face(
    "Swin",
    "SwinForImageClassification",
    "swin.embeddings swin.encoder.layers.* classifier",
    pictures,
    image_size=8,
    patch_size=2,
    embed_dim=8,
    depths=[2, 1],
    num_heads=[2, 2],
    window_size=2,
    drop_path_rate=0.0,
    num_labels=3,
)
hugging_face(
    "ConvNeXt",
    "ConvNextForImageClassification",
    "convnext.embeddings convnext.encoder.stages.* classifier",
    pictures,
    patch_size=2,
    num_stages=2,
    hidden_sizes=[8, 8],
    depths=[1, 1],
    num_labels=3,
)
hugging_face(
    "ResNet",
    "ResNetForImageClassification",
    "resnet.embedder resnet.encoder.stages.* classifier",
    pictures,
    inherent=True,
    embedding_size=8,
    hidden_sizes=[8, 8],
    depths=[1, 1],
    layer_type="basic",
    num_labels=3,
)
hugging_face(
    "MobileViT",
    "MobileViTForImageClassification",
    "mobilevit.conv_stem mobilevit.encoder.layer.* classifier",
    lambda rows, generator: (
        {
            "pixel_values": torch.randn(rows, 3, 32, 32, generator=generator, dtype=torch.float64),
            "labels": torch.randint(3, (rows,), generator=generator),
        },
        None,
    ),
    inherent=True,
    image_size=32,
    hidden_sizes=[8, 8, 8],
    neck_hidden_sizes=[4, 4, 8, 8, 8, 8, 8],
    num_attention_heads=2,
    hidden_dropout_prob=0.0,
    classifier_dropout_prob=0.0,
    num_labels=3,
)


def spoken(rows, generator):
    labels = ids(rows, generator, 5)
    labels[:, -1] = -100
    return {
        "input_features": torch.randn(rows, 8, 16, generator=generator, dtype=torch.float64),
        "labels": labels,
    }, None


WHISPER = {
    "vocab_size": WORDS,
    "num_mel_bins": 8,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_source_positions": 8,
    "max_target_positions": 16,
    "dropout": 0.0,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
hugging_face(
    "Whisper",
    "WhisperForConditionalGeneration",
    "model.encoder.conv1 model.encoder.layers.* model.decoder.embed_tokens model.decoder.layers.* proj_out",
    spoken,
    **WHISPER,
)


def heard(rows, generator):
    return {
        "input_values": torch.randn(rows, 200, generator=generator, dtype=torch.float64),
        "labels": torch.randint(3, (rows,), generator=generator),
    }, None


WAV = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "conv_dim": [8, 8],
    "conv_stride": [5, 4],
    "conv_kernel": [10, 8],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "final_dropout": 0.0,
    "layerdrop": 0.0,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
    "num_labels": 3,
    "classifier_proj_size": 8,
}
hugging_face(
    "wav2vec 2",
    "Wav2Vec2ForSequenceClassification",
    "wav2vec2.feature_extractor wav2vec2.encoder.layers.* classifier",
    heard,
    **WAV,
)
hugging_face(
    "wav2vec 2 with LayerDrop",
    "Wav2Vec2ForSequenceClassification",
    "wav2vec2.feature_extractor wav2vec2.encoder.layers.* classifier",
    heard,
    random=True,
    refusal="random|value|never calls",
    **{**WAV, "layerdrop": 0.5},
)
hugging_face(
    "HuBERT",
    "HubertForSequenceClassification",
    "hubert.feature_extractor hubert.encoder.layers.* classifier",
    heard,
    **WAV,
)


def described(rows, generator):
    return {
        "input_ids": ids(rows, generator),
        "pixel_values": torch.randn(rows, 3, 8, 8, generator=generator, dtype=torch.float64),
        "return_loss": True,
    }, None


TEXT = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": LENGTH,
    "eos_token_id": 39,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
IMAGE = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
TOWERS = "text_model.embeddings text_model.encoder.layers.* vision_model.embeddings vision_model.encoder.layers.*"
hugging_face(
    "CLIP with return_loss",
    "CLIPModel",
    f"{TOWERS} text_projection visual_projection",
    described,
    inherent=True,
    refusal="rows|mix",
    text_config=TEXT,
    vision_config=IMAGE,
    projection_dim=8,
)
hugging_face(
    "SigLIP with return_loss",
    "SiglipModel",
    TOWERS,
    described,
    inherent=True,
    refusal="rows|mix",
    text_config=TEXT,
    vision_config=IMAGE,
)


def seen_text(rows, generator):
    x = ids(rows, generator)
    return {
        "pixel_values": torch.randn(rows, 3, 8, 8, generator=generator, dtype=torch.float64),
        "input_ids": x,
        "labels": x,
    }, None


BLIP_TEXT = {
    **TEXT,
    "encoder_hidden_size": 16,
    "attention_probs_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
    "projection_dim": 8,
    "max_position_embeddings": 32,
    "use_cache": False,
}
hugging_face(
    "BLIP, captions",
    "BlipForConditionalGeneration",
    "vision_model.embeddings vision_model.encoder.layers.* text_decoder",
    seen_text,
    text_config=BLIP_TEXT,
    vision_config={**IMAGE, "attention_dropout": 0.0},
    projection_dim=8,
    image_text_hidden_size=8,
)
