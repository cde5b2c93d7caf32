"""Vision, speech and two towers of transformers, with `labels` or a loss among the inputs."""

from __future__ import annotations

import torch
from foreign.huggingface import LENGTH, WORDS, hugging_face, ids, pictures

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
hugging_face(
    "DeiT", "DeiTForImageClassification", "deit.embeddings deit.layers.* classifier", pictures, usual=False, **VIT
)
hugging_face(
    "BEiT",
    "BeitForImageClassification",
    "beit.embeddings beit.layers.* classifier",
    pictures,
    drop_path_rate=0.0,
    usual=False,
    **VIT,
)
hugging_face(
    "DINOv2",
    "Dinov2ForImageClassification",
    "dinov2.embeddings dinov2.encoder.layer.* classifier",
    pictures,
    drop_path_rate=0.0,
    usual=False,
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
    usual=False,
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
    usual=False,
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
    usual=False,
    **WAV,
)


def transcribed(rows, generator):
    """Sounds, the last steps of every second one silent, with two to four letters each."""
    labels = ids(rows, generator, 4)
    labels[1::2, 2:] = -100
    attended = torch.ones(rows, 400, dtype=torch.long)
    attended[1::2, 300:] = 0
    sounds = torch.randn(rows, 400, generator=generator, dtype=torch.float64)
    return {"input_values": sounds, "attention_mask": attended, "labels": labels}, None


for base, usual in (("Wav2Vec2", True), ("Hubert", False), ("WavLM", False)):
    hugging_face(
        f"{base} with a CTC loss",
        f"{base}ForCTC",
        f"{base.lower()}.feature_extractor {base.lower()}.encoder.layers.* lm_head",
        transcribed,
        usual=usual,
        ctc_loss_reduction="mean",
        ctc_zero_infinity=True,
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
    usual=False,
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
    usual=False,
)
hugging_face(
    "DPT: a backbone whose hidden states are read",
    "DPTForDepthEstimation",
    "dpt.embeddings dpt.encoder.layer.* neck head",
    lambda rows, generator: (
        {"pixel_values": torch.randn(rows, 3, 16, 16, generator=generator, dtype=torch.float64)},
        None,
    ),
    loss=lambda output, _: output.predicted_depth.square().mean(),
    is_hybrid=False,
    backbone_out_indices=[0, 1, 2, 3],
    neck_hidden_sizes=[8, 8, 8, 8],
    fusion_hidden_size=8,
    usual=False,
    **{**VIT, "image_size": 16, "num_hidden_layers": 4},
)
