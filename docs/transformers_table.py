"""Writes the table of docs/transformers.md: one small model of every architecture, what is seen, and what is right.

Run by hand, ``python docs/transformers.py [GLOB …]``; a slow test runs a few rows of it.
"""

import contextlib
import copy
import fnmatch
import importlib
import sys
import warnings
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional
from unittest import mock

import torch
from torch import Tensor, nn

from attncnn_plugin import rollout
from attncnn_plugin.heads.seen import watching

VIT = dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4)
CLASSES = dict(num_classes=5)
# The file of timm, a model of it, what it is built with, the size of images, and how many attentions it computes.
TIMM = [
    ('beit', 'beit_base_patch16_224', VIT, 32, 2),
    ('byoanet', 'halonet26t', {}, 256, 3),
    ('byoanet', 'botnet26t_256', {}, 256, 3),
    ('byobnet', 'gcresnet33ts', {}, 64, 0),
    ('byobnet', 'resnet50_clip', dict(img_size=64), 64, 1),
    ('cait', 'cait_xxs24_224', dict(VIT, depth_token_only=1), 32, 3),
    ('coat', 'coat_lite_tiny', dict(img_size=64), 64, 0),
    ('convit', 'convit_tiny', dict(VIT, local_up_to_layer=1), 32, 2),
    ('cpubone', 'cpubone_nano', {}, 64, 0),
    ('crossvit', 'crossvit_9_240', {}, 240, 15),
    ('csatv2', 'csatv2', {}, 64, 0),
    ('davit', 'davit_tiny', dict(depths=(1, 1, 1, 1)), 64, 8),
    ('deepseek_vit', 'deepseek_vit_412m', dict(VIT), 32, 2),
    ('deit', 'deit_tiny_distilled_patch16_224', VIT, 32, 2),
    ('edgenext', 'edgenext_xx_small', {}, 64, 0),
    ('efficientformer', 'efficientformer_l1', {}, 224, 1),
    ('efficientformer_v2', 'efficientformerv2_s0', {}, 224, 4),
    ('efficientnet', 'mobilenetv4_hybrid_medium_075', {}, 64, 0),
    ('efficientvim', 'efficientvim_m1', {}, 64, 0),
    ('efficientvit_mit', 'efficientvit_b0', {}, 64, 0),
    ('efficientvit_msra', 'efficientvit_m0', {}, 224, 6),
    ('eva', 'eva02_tiny_patch14_224', dict(VIT), 32, 2),
    ('fastvit', 'fastvit_sa12', {}, 64, 0),
    ('gcvit', 'gcvit_xxtiny', {}, 224, 12),
    ('gemma4_vit', 'gemma4_vit_167m', dict(VIT), 32, 2),
    ('hiera', 'hiera_tiny_224', dict(embed_dim=16, stages=(1, 1, 2, 1), img_size=(64, 64)), 64, 5),
    ('hieradet_sam2', 'sam2_hiera_tiny', dict(embed_dim=16, stages=(1, 1, 2, 1)), 64, 5),
    ('iformer', 'iformer_t', {}, 64, 0),
    ('levit', 'levit_128s', {}, 224, 0),
    ('lowformer', 'lowformer_b0', {}, 64, 0),
    ('maxxvit', 'test_maxvit', dict(img_size=128), 128, 0),
    ('maxxvit', 'test_coatnet', dict(img_size=64), 64, 0),
    ('metaformer', 'caformer_s18', {}, 64, 12),
    ('mobilenetv5', 'mobilenetv5_base', {}, 64, 0),
    ('mobilevit', 'mobilevit_xxs', {}, 64, 9),
    ('mobilevit', 'mobilevitv2_050', {}, 64, 0),
    ('mvitv2', 'mvitv2_tiny', dict(img_size=64), 64, 10),
    ('naflexvit', 'naflexvit_base_patch16_map', dict(embed_dim=32, depth=2, num_heads=4), 64, 3),
    ('nest', 'nest_tiny', dict(img_size=64), 64, 12),
    ('nextvit', 'nextvit_small', {}, 64, 0),
    ('pit', 'pit_ti_224', dict(), 224, 0),
    ('pvt_v2', 'pvt_v2_b0', dict(depths=(1, 1, 1, 1)), 64, 4),
    ('qwen3_vit', 'qwen3_vit_88m', dict(VIT), 32, 2),
    ('shvit', 'shvit_s1', {}, 64, 0),
    ('swiftformer', 'swiftformer_xs', {}, 64, 0),
    ('swin_transformer', 'swin_tiny_patch4_window7_224', dict(img_size=64, window_size=4, depths=(2, 2), embed_dim=24, num_heads=(2, 4)), 64, 4),
    ('swin_transformer_v2', 'swinv2_tiny_window8_256', dict(img_size=64, window_size=4, depths=(2, 2), embed_dim=24, num_heads=(2, 4)), 64, 4),
    ('swin_transformer_v2_cr', 'swinv2_cr_tiny_224', dict(img_size=64, window_size=4, depths=(2, 2), embed_dim=24, num_heads=(2, 4)), 64, 4),
    ('tiny_vit', 'tiny_vit_5m_224', dict(embed_dims=(16, 32, 32, 64), depths=(1, 1, 2, 1), num_heads=(1, 2, 2, 4)), 224, 4),
    ('tnt', 'tnt_s_patch16_224', dict(img_size=64, embed_dim=32, inner_dim=8, depth=2, num_heads_outer=4), 64, 4),
    ('twins', 'twins_pcpvt_small', dict(depths=(1, 1, 1, 1)), 64, 4),
    ('twins', 'twins_svt_small', dict(depths=(2, 2, 2, 2)), 224, 8),
    ('visformer', 'visformer_tiny', dict(img_size=64), 64, 0),
    ('vision_transformer', 'vit_base_patch16_siglip_224', VIT, 32, 3),
    ('vision_transformer', 'vit_dlittle_patch16_reg1_gap_256', VIT, 32, 2),
    ('vision_transformer_hybrid', 'vit_tiny_r_s16_p8_224', dict(VIT, img_size=64, patch_size=1), 64, 2),
    ('vision_transformer_relpos', 'vit_relpos_small_patch16_224', VIT, 32, 2),
    ('vision_transformer_sam', 'samvit_base_patch16', dict(VIT, window_size=3, global_attn_indexes=(1,)), 32, 2),
    ('vitamin', 'vitamin_small_224', dict(), 224, 0),
    ('volo', 'volo_d1_224', dict(img_size=64), 64, 0),
    ('xcit', 'xcit_nano_12_p16_224', dict(VIT, cls_attn_layers=1), 32, 3),
]


def image(size: int = 32, **more: Any) -> Dict[str, Any]:
    """Returns images as models of Hugging Face take them."""
    return dict(pixel_values=torch.randn(2, 3, size, size), **more)


torch.manual_seed(0)
IDS = torch.arange(14).view(2, 7) + 3
TEXT = dict(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
HF = dict(TEXT, image_size=32, patch_size=8)
PYRAMID = dict(hidden_sizes=[16, 16, 32, 32], depths=[1, 1, 1, 1], num_attention_heads=[1, 1, 2, 4])
SWIN = dict(image_size=64, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4)
BOTH = dict(text_config=TEXT, vision_config=HF, projection_dim=16)
RESNET = dict(model_type='resnet', embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], out_features=['stage4'])
RESNETS = dict(RESNET, out_features=['stage2', 'stage3', 'stage4'])
DETR = dict(d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, num_queries=5)  # fmt: skip
WAVES = dict(TEXT, conv_dim=[16, 16], conv_stride=[5, 2], conv_kernel=[10, 3], num_feat_extract_layers=2, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2)  # fmt: skip
VIDEO = dict(HF, num_frames=4)
FRAMES = dict(pixel_values=torch.randn(2, 4, 3, 32, 32))
HUGGING_FACE = [
    ('Aimv2Model', dict(vision_config=HF, text_config=TEXT, projection_dim=16), image(input_ids=IDS), 5),
    ('ASTModel', dict(TEXT, max_length=40, num_mel_bins=16, patch_size=8, frequency_stride=8, time_stride=8), dict(input_values=torch.randn(2, 40, 16)), 2),
    ('BeitModel', HF, image(), 2),
    ('BertModel', TEXT, dict(input_ids=IDS), 2),
    ('BlipModel', BOTH, image(input_ids=IDS), 0),
    ('CLIPModel', BOTH, image(input_ids=IDS), 4),
    ('CLIPSegForImageSegmentation', dict(BOTH, extract_layers=[0, 1], reduce_dim=16, decoder_num_attention_heads=2), image(input_ids=IDS), 0),
    ('ConditionalDetrModel', dict(DETR, backbone_config=RESNET), image(64), 3),
    ('CvtModel', dict(patch_sizes=[7, 3, 3], embed_dim=[8, 16, 32], num_heads=[1, 2, 4], depth=[1, 2, 3]), image(64), 6),
    ('Data2VecVisionModel', HF, image(), 2),
    ('DabDetrModel', dict(DETR, hidden_size=32, backbone_config=RESNET), image(64), 0),
    ('DeformableDetrModel', dict(DETR, backbone_config=RESNETS), image(64), 0),
    ('DeiTModel', HF, image(), 2),
    ('DepthAnythingForDepthEstimation', dict(backbone_config=dict(HF, num_hidden_layers=4, model_type='dinov2', out_indices=[1, 2, 3, 4], reshape_hidden_states=False), reassemble_hidden_size=32, patch_size=8, neck_hidden_sizes=[8, 8, 16, 16], fusion_hidden_size=8), image(), 4),
    ('DetrModel', dict(DETR, backbone_config=RESNET), image(64), 3),
    ('Dinov2Model', HF, image(), 2),
    ('Dinov2WithRegistersModel', HF, image(), 2),
    ('DINOv3ViTModel', HF, image(), 2),
    ('DonutSwinModel', SWIN, image(64), 4),
    ('DPTModel', HF, image(), 2),
    ('EomtForUniversalSegmentation', dict(HF, num_blocks=1, num_queries=5, num_upscale_blocks=1), image(), 2),
    ('FlavaModel', dict(text_config=TEXT, image_config=HF, multimodal_config=TEXT, hidden_size=32, projection_dim=16), image(input_ids=IDS), 6),
    ('Florence2VisionBackbone', dict(depths=[1, 1], embed_dim=[16, 32], num_heads=[2, 4], num_groups=[2, 4], window_size=4, patch_size=[7, 3], patch_stride=[4, 2], patch_padding=[3, 1], patch_prenorm=[False, True]), dict(hidden_states=torch.randn(2, 3, 64, 64)), 4),
    ('GLPNForDepthEstimation', dict(PYRAMID, sr_ratios=[4, 2, 2, 1], decoder_hidden_size=8), image(64), 4),
    ('GroundingDinoModel', dict(DETR, backbone_config=RESNETS, text_config=dict(TEXT, model_type='bert'), decoder_bbox_embed_share=False), image(64, input_ids=IDS), 0),
    ('GroupViTModel', dict(text_config=TEXT, vision_config=dict(HF, depths=[1, 1, 0], num_group_tokens=[4, 2, 0], num_output_groups=[4, 2, 0]), projection_dim=16), image(input_ids=IDS), 0),
    ('GPT2Model', dict(vocab_size=50, n_embd=32, n_layer=2, n_head=4), dict(input_ids=IDS), 2),
    ('HieraModel', dict(image_size=[64, 64], embed_dim=16, depths=[1, 1, 2, 1]), image(64), 5),
    ('IJepaModel', HF, image(), 2),
    ('LevitModel', dict(image_size=64, hidden_sizes=[16, 24, 32], num_attention_heads=[2, 3, 4], depths=[1, 1, 1], key_dim=[8, 8, 8]), image(64), 5),
    ('LlamaModel', dict(TEXT, num_key_value_heads=2), dict(input_ids=IDS), 2),
    ('Mask2FormerModel', dict(backbone_config=dict(SWIN, model_type='swin', depths=[1, 1, 1, 1], num_heads=[1, 2, 2, 4], out_features=['stage1', 'stage2', 'stage3', 'stage4']), hidden_dim=32, feature_size=32, mask_feature_size=32, num_attention_heads=4, encoder_layers=1, decoder_layers=3, num_queries=5, encoder_feedforward_dim=32, dim_feedforward=32), image(64), 0),
    ('MaskFormerModel', dict(backbone_config=dict(SWIN, model_type='swin', depths=[1, 1, 1, 1], num_heads=[1, 2, 2, 4], out_features=['stage1', 'stage2', 'stage3', 'stage4']), decoder_config=dict(DETR, model_type='detr'), fpn_feature_size=32, mask_feature_size=32), image(64), 6),
    ('MobileViTModel', dict(image_size=64, hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 8, 16, 16, 16, 32]), image(64), 9),
    ('MobileViTV2Model', dict(image_size=64, width_multiplier=0.25), image(64), 0),
    ('Owlv2ForObjectDetection', dict(BOTH, projection_dim=32), image(input_ids=IDS), 4),
    ('OwlViTForObjectDetection', dict(BOTH, projection_dim=32), image(input_ids=IDS), 4),
    ('PerceiverForImageClassificationLearned', dict(d_latents=32, num_latents=6, num_blocks=1, num_self_attends_per_block=2, num_self_attention_heads=4, num_cross_attention_heads=4, image_size=8, d_model=32), dict(inputs=torch.randn(2, 3, 8, 8)), 4),
    ('PvtModel', dict(PYRAMID, image_size=64), image(64), 4),
    ('PvtV2Model', dict(PYRAMID, image_size=64), image(64), 4),
    ('RTDetrModel', dict(DETR, backbone_config=dict(RESNETS, model_type='rt_detr_resnet'), encoder_in_channels=[8, 16, 16], encoder_hidden_dim=32, hidden_size=32, feat_channels=[32, 32, 32], decoder_in_channels=[32, 32, 32], decoder_layers=1), image(64), 2),
    ('SamModel', dict(vision_config=dict(HF, output_channels=32, window_size=3, global_attn_indexes=[1], num_pos_feats=16, mlp_dim=32), prompt_encoder_config=dict(hidden_size=32, image_size=32, patch_size=8, mask_input_channels=4), mask_decoder_config=dict(hidden_size=32, num_attention_heads=4, mlp_dim=32, iou_head_hidden_dim=32)), image(input_points=torch.tensor([[[[4., 4]]], [[[9., 20]]]])), 9),
    ('SegformerModel', PYRAMID, image(64), 4),
    ('Siglip2VisionModel', dict(HF, num_patches=16), dict(pixel_values=torch.randn(2, 16, 192), pixel_attention_mask=torch.ones(2, 16).long(), spatial_shapes=torch.tensor([[4, 4], [2, 8]])), 3),
    ('SiglipModel', dict(text_config=TEXT, vision_config=HF), image(input_ids=IDS), 5),
    ('SwinModel', SWIN, image(64), 4),
    ('Swin2SRModel', dict(SWIN, num_channels=3, patch_size=1, image_size=16), image(16), 4),
    ('Swinv2Model', SWIN, image(64), 4),
    ('SwiftFormerModel', {}, image(64), 0),
    ('T5Model', dict(vocab_size=50, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4), dict(input_ids=IDS, decoder_input_ids=IDS), 6),
    ('TableTransformerModel', dict(DETR, backbone_config=RESNET), image(64), 3),
    ('TimesformerModel', VIDEO, FRAMES, 4),
    ('UperNetForSemanticSegmentation', dict(backbone_config=dict(SWIN, model_type='swin', depths=[1, 1, 1, 1], num_heads=[1, 2, 2, 4], out_features=['stage1', 'stage2', 'stage3', 'stage4']), hidden_size=16, auxiliary_in_channels=64), image(64), 4),
    ('VideoMAEModel', VIDEO, FRAMES, 2),
    ('ViltModel', dict(HF, max_position_embeddings=20), image(input_ids=IDS), 2),
    ('ViTMAEForPreTraining', dict(HF, decoder_hidden_size=16, decoder_num_hidden_layers=1, decoder_num_attention_heads=2, decoder_intermediate_size=32), image(), 3),
    ('ViTModel', HF, image(), 2),
    ('ViTMSNModel', HF, image(), 2),
    ('VitDetModel', dict(HF, window_size=2, window_block_indices=[0]), image(), 2),
    ('VitPoseForPoseEstimation', dict(backbone_config=dict(HF, model_type='vitpose_backbone', image_size=[32, 32], patch_size=[8, 8], out_features=['stage2'])), image(), 2),
    ('VivitModel', dict(VIDEO, tubelet_size=[2, 8, 8]), FRAMES, 2),
    ('VJEPA2Model', dict(crop_size=32, patch_size=8, frames_per_clip=4, hidden_size=48, num_attention_heads=2, num_hidden_layers=2, pred_hidden_size=48, pred_num_attention_heads=2, pred_num_hidden_layers=1), dict(pixel_values_videos=torch.randn(2, 4, 3, 32, 32)), 3),
    ('Wav2Vec2Model', WAVES, dict(input_values=torch.randn(2, 400)), 2),
    ('WhisperModel', dict(vocab_size=50, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, num_mel_bins=8, max_source_positions=10, pad_token_id=0, bos_token_id=1, eos_token_id=1, decoder_start_token_id=1), dict(input_features=torch.randn(2, 8, 20), decoder_input_ids=IDS), 3),
    ('XCLIPModel', dict(BOTH, projection_dim=32, prompt_layers=1, prompt_num_attention_heads=2, vision_config=dict(VIDEO, mit_hidden_size=32, mit_intermediate_size=32, mit_num_hidden_layers=1, mit_num_attention_heads=2)), dict(FRAMES, input_ids=IDS), 8),
    ('YolosModel', dict(HF, image_size=[32, 32], num_detection_tokens=5), image(), 2),
    ('ZoeDepthForDepthEstimation', dict(backbone_config=dict(HF, num_hidden_layers=4, model_type='beit', out_indices=[1, 2, 3, 4], reshape_hidden_states=False, use_relative_position_bias=True), backbone_hidden_size=32, neck_hidden_sizes=[8, 8, 16, 16], fusion_hidden_size=8, bottleneck_features=8), image(), 4),
    ('Sam2HieraDetModel', dict(hidden_size=16, image_size=[64, 64], blocks_per_stage=[1, 1, 2, 1], embed_dim_per_stage=[16, 32, 64, 128], num_attention_heads_per_stage=[1, 2, 4, 8], window_size_per_stage=[8, 4, 4, 2], global_attention_blocks=[3]), image(64), 5),
]
PIXELS = torch.randn(2, 3, 64, 64)
LUCID = dict(image_size=64, patch_size=16, num_classes=5, dim=32, depth=2, heads=4, mlp_dim=32, dim_head=8)
ARCH = dict(embed_dims=32, num_layers=2, num_heads=4, feedforward_channels=48)
MM = dict(arch=ARCH, img_size=64, patch_size=16)
OPEN_CLIP = dict(embed_dim=16, text_cfg=dict(context_length=7, vocab_size=50, width=32, heads=4, layers=2))
# The module and class of other libraries.
OTHERS = [
    ('mmpretrain.models.BEiTViT', MM, PIXELS, 2),
    ('mmpretrain.models.Conformer', dict(arch=dict(embed_dims=32, channel_ratio=1, num_heads=4, depths=12)), PIXELS, 12),
    ('mmpretrain.models.DaViT', dict(arch=dict(embed_dims=16, depths=[1, 1], num_heads=[2, 4], embed_groups=[2, 4]), window_size=4, out_indices=(0, 1)), PIXELS, 4),
    ('mmpretrain.models.DeiT3', MM, PIXELS, 2),
    ('mmpretrain.models.DistilledVisionTransformer', MM, PIXELS, 2),
    ('mmpretrain.models.EdgeNeXt', {}, PIXELS, 3),
    ('mmpretrain.models.EfficientFormer', dict(arch='l1'), torch.randn(2, 3, 224, 224), 1),
    ('mmpretrain.models.HiViT', dict(arch='tiny', img_size=64), PIXELS, 10),
    ('mmpretrain.models.LeViT', dict(arch='128s', img_size=224), torch.randn(2, 3, 224, 224), 11),
    ('mmpretrain.models.MixMIMTransformer', dict(arch=dict(embed_dims=16, depths=[1, 1, 1, 1], num_heads=[1, 2, 2, 4]), img_size=64, window_size=[4, 4, 4, 2]), PIXELS, 4),
    ('mmpretrain.models.MobileViT', dict(arch='xx_small'), PIXELS, 9),
    ('mmpretrain.models.MViT', dict(arch=dict(embed_dims=16, num_layers=4, num_heads=1, downscale_indices=[1, 3])), PIXELS, 4),
    ('mmpretrain.models.RevVisionTransformer', MM, PIXELS, 2),
    ('mmpretrain.models.SwinTransformer', dict(arch=dict(embed_dims=16, depths=[1, 2, 1, 1], num_heads=[2, 4, 4, 4]), img_size=64, window_size=4, pad_small_map=True), PIXELS, 5),
    ('mmpretrain.models.SwinTransformerV2', dict(arch=dict(embed_dims=16, depths=[1, 2, 1, 1], num_heads=[2, 4, 4, 4], extra_norm_every_n_blocks=0), img_size=64, window_size=[4, 4, 4, 2], pad_small_map=True), PIXELS, 5),
    ('mmpretrain.models.T2T_ViT', dict(img_size=64, embed_dims=32, num_layers=2, t2t_cfg=dict(token_dims=16), layer_cfgs=dict(num_heads=4, feedforward_channels=32)), PIXELS, 2),
    ('mmpretrain.models.TinyViT', dict(arch='5m', img_size=(224, 224)), torch.randn(2, 3, 224, 224), 10),
    ('mmpretrain.models.TNT', dict(arch=dict(embed_dims_outer=32, embed_dims_inner=8, num_layers=2, num_heads_outer=4, num_heads_inner=2), img_size=64), PIXELS, 4),
    ('mmpretrain.models.PCPVT', dict(arch=dict(embed_dims=[16, 16, 32, 32], depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 4], patch_sizes=[4, 2, 2, 2], strides=[4, 2, 2, 2], mlp_ratios=[2, 2, 2, 2], sr_ratios=[8, 4, 2, 1])), PIXELS, 4),
    ('mmpretrain.models.SVT', dict(arch=dict(embed_dims=[16, 16, 32, 32], depths=[2, 2, 2, 2], num_heads=[1, 1, 2, 4], patch_sizes=[4, 2, 2, 2], strides=[4, 2, 2, 2], mlp_ratios=[2, 2, 2, 2], sr_ratios=[8, 4, 2, 1], window_sizes=[7, 7, 7, 7])), PIXELS, 8),
    ('mmpretrain.models.VisionTransformer', MM, PIXELS, 2),
    ('mmpretrain.models.ViTEVA02', dict(MM, sub_ln=True), PIXELS, 2),
    ('mmpretrain.models.ViTSAM', dict(arch=dict(ARCH, global_attn_indexes=[1]), img_size=64, patch_size=16, out_channels=16, window_size=3), PIXELS, 2),
    ('mmpretrain.models.XCiT', dict(patch_size=16, embed_dims=32, depth=2, num_heads=4, cls_attn_layers=1), PIXELS, 3),
    ('torchvision.models.MaxVit', dict(input_size=(64, 64), stem_channels=8, partition_size=4, block_channels=[16, 32], block_layers=[1, 1], head_dim=8, stochastic_depth_prob=0.0), PIXELS, 4),
    ('torchvision.models.SwinTransformer', dict(patch_size=[4, 4], embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=[4, 4]), PIXELS, 4),
    ('torchvision.models.swin_v2_t', {}, PIXELS, 12),
    ('torchvision.models.VisionTransformer', dict(image_size=64, patch_size=16, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=48), PIXELS, 2),
    ('torchvision.models.video.mvit_v2_s', {}, torch.randn(1, 3, 16, 224, 224), 16),
    ('torchvision.models.video.SwinTransformer3d', dict(patch_size=[2, 4, 4], embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=[2, 4, 4]), torch.randn(1, 3, 4, 32, 32), 4),
    ('open_clip.model.CLIP', dict(OPEN_CLIP, vision_cfg=dict(image_size=32, patch_size=8, width=32, head_width=8, layers=2)), dict(image=torch.randn(2, 3, 32, 32), text=IDS), 4),
    ('open_clip.model.CustomTextCLIP', dict(OPEN_CLIP, vision_cfg=dict(image_size=32, patch_size=8, width=32, head_width=8, layers=2, attentional_pool=True, attn_pooler_queries=4, attn_pooler_heads=4)), dict(image=torch.randn(2, 3, 32, 32), text=IDS), 5),
    ('open_clip.coca_model.CoCa', dict(embed_dim=32, text_cfg=dict(context_length=8, vocab_size=50, width=32, heads=4, layers=2, embed_cls=True, output_tokens=True), multimodal_cfg=dict(context_length=8, vocab_size=50, width=32, heads=4, layers=1), vision_cfg=dict(image_size=32, patch_size=8, width=32, head_width=8, layers=2, attentional_pool=True, attn_pooler_heads=4, output_tokens=True)), dict(image=torch.randn(2, 3, 32, 32), text=IDS), 7),
    ('vit_pytorch.ViT', LUCID, PIXELS, 2),
    ('vit_pytorch.SimpleViT', LUCID, PIXELS, 2),
    ('vit_pytorch.cait.CaiT', dict(LUCID, cls_depth=1), PIXELS, 3),
    ('vit_pytorch.cct.CCT', dict(img_size=64, embedding_dim=32, num_layers=2, num_heads=4, mlp_ratio=1, num_classes=5), PIXELS, 3),
    ('vit_pytorch.cross_vit.CrossViT', dict(image_size=96, num_classes=5, sm_dim=16, lg_dim=32, depth=1, lg_enc_depth=1, cross_attn_depth=1, lg_patch_size=24), torch.randn(2, 3, 96, 96), 4),
    ('vit_pytorch.crossformer.CrossFormer', dict(dim=(32, 32, 64, 64), depth=(1, 1, 1, 1), num_classes=5), torch.randn(2, 3, 224, 224), 8),
    ('vit_pytorch.cvt.CvT', dict(num_classes=5, s3_depth=1), PIXELS, 4),
    ('vit_pytorch.deepvit.DeepViT', LUCID, PIXELS, 2),
    ('vit_pytorch.levit.LeViT', dict(image_size=224, num_classes=5, dim=32, depth=1, heads=2, mlp_mult=2), torch.randn(2, 3, 224, 224), 5),
    ('vit_pytorch.look_vit.LookViT', dict(dim=32, image_size=96, num_classes=5, depth=1, patch_size=24, heads=2, dim_head=8, cross_attn_heads=2, cross_attn_dim_head=8), torch.randn(2, 3, 96, 96), 4),
    ('vit_pytorch.max_vit.MaxViT', dict(num_classes=5, dim=16, depth=(1, 1), dim_head=8), torch.randn(2, 3, 112, 112), 4),
    ('vit_pytorch.max_vit_with_registers.MaxViT', dict(num_classes=5, dim=16, depth=(1, 1), dim_head=8), torch.randn(2, 3, 112, 112), 4),
    ('vit_pytorch.mobile_vit.MobileViT', dict(image_size=(64, 64), dims=[16, 24, 32], channels=[8, 8, 16, 16, 16, 16, 24, 24, 32, 32, 48], num_classes=5), PIXELS, 9),
    ('vit_pytorch.nest.NesT', dict(image_size=64, patch_size=8, dim=16, heads=2, num_hierarchies=2, block_repeats=(1, 1), num_classes=5), PIXELS, 2),
    ('vit_pytorch.normalized_vit.nViT', LUCID, PIXELS, 2),
    ('vit_pytorch.parallel_vit.ViT', LUCID, PIXELS, 4),
    ('vit_pytorch.pit.PiT', dict(LUCID, depth=(1, 1)), PIXELS, 2),
    ('vit_pytorch.regionvit.RegionViT', dict(dim=(16, 16, 32, 32), depth=(1, 1, 1, 1), num_classes=5), torch.randn(2, 3, 224, 224), 4),
    ('vit_pytorch.rvt.RvT', LUCID, PIXELS, 2),
    ('vit_pytorch.scalable_vit.ScalableViT', dict(num_classes=5, dim=16, heads=(1, 2), depth=(1, 1), reduction_factor=(4, 2), window_size=(8, None)), PIXELS, 4),
    ('vit_pytorch.sep_vit.SepViT', dict(num_classes=5, dim=16, dim_head=8, heads=(1, 2), depth=(1, 1)), torch.randn(2, 3, 224, 224), 4),
    ('vit_pytorch.simple_flash_attn_vit.SimpleViT', LUCID, PIXELS, 2),
    ('vit_pytorch.simple_vit_with_register_tokens.SimpleViT', LUCID, PIXELS, 2),
    ('vit_pytorch.simple_vit_with_value_residual.SimpleViT', LUCID, PIXELS, 2),
    ('vit_pytorch.t2t.T2TViT', dict(image_size=64, num_classes=5, dim=32, depth=2, heads=4, mlp_dim=32), PIXELS, 4),
    ('vit_pytorch.twins_svt.TwinsSVT', dict(num_classes=5, s3_depth=1, s4_depth=1), torch.randn(2, 3, 224, 224), 8),
    ('vit_pytorch.vit_for_small_dataset.ViT', LUCID, PIXELS, 2),
    ('vit_pytorch.vit_nd_rotary.ViTND', dict(input_shape=(64, 64), patch_size=16, num_classes=5, dim=32, depth=2, heads=4, mlp_dim=32, dim_head=8, ndim=2), PIXELS, 2),
    ('vit_pytorch.vit_with_patch_merger.ViT', LUCID, PIXELS, 3),
    ('vit_pytorch.vivit.ViViT', dict(image_size=32, image_patch_size=8, frames=4, frame_patch_size=2, num_classes=5, dim=32, spatial_depth=2, temporal_depth=1, heads=4, mlp_dim=32, dim_head=8), torch.randn(2, 3, 4, 32, 32), 3),
    ('vit_pytorch.xcit.XCiT', dict(LUCID, cls_depth=1), PIXELS, 3),
    ('segmentation_models_pytorch.Segformer', dict(encoder_name='mit_b0', encoder_weights=None), PIXELS, 8),
    ('segmentation_models_pytorch.Unet', dict(encoder_name='tu-swin_tiny_patch4_window7_224', encoder_weights=None), torch.randn(2, 3, 224, 224), 12),
    ('segmentation_models_pytorch.DPT', dict(encoder_name='tu-vit_tiny_patch16_224', encoder_weights=None), torch.randn(2, 3, 224, 224), 12),
    ('segmentation_models_pytorch.MAnet', dict(encoder_name='resnet18', encoder_weights=None), PIXELS, 1),
    ('segmentation_models_pytorch.PAN', dict(encoder_name='resnet18', encoder_weights=None), torch.randn(2, 3, 128, 128), 0),
]


class Row(NamedTuple):
    """A model of the table."""

    library: str
    name: str
    build: Callable[[bool], nn.Module]  # fused or not
    inputs: Any
    there: int
    own: Callable[..., Any] = lambda model, inputs: call(model, inputs) is None or []


class Result(NamedTuple):
    """What a model showed; the fields are columns."""

    seen: int
    compared: int
    difference: float
    changed: bool
    rollout: str


def timm_row(file: str, name: str, settings: Dict[str, Any], size: int, there: int) -> Row:
    """Returns a model of timm."""
    import timm

    def build(fused: bool) -> nn.Module:
        model: nn.Module = timm.create_model(name, **CLASSES, **settings)
        return model

    return Row('timm', f'{file}: {name}', build, torch.Size((2, 3, size, size)), there)


def enlarged(model: nn.Module) -> nn.Module:
    """Draws weights so large that no attention is uniform."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1 and parameter.numel():
            nn.init.normal_(parameter, std=1.5 * parameter[0].numel() ** -0.5)
        elif parameter.numel() and parameter.abs().max() < 0.1 and parameter.any():
            nn.init.ones_(parameter)  # scales of layers
    model.eval()  # mmpretrain's returns None
    return model


@contextlib.contextmanager
def computed(model: nn.Module) -> Iterator[List[Tensor]]:
    """Yields what an unfused model gives to dropout and to values: its library's own numbers."""
    found: List[Tensor] = []
    handles: List[Any] = []

    def before_dropout(module: nn.Module, args: Any) -> None:
        if args and args[0].ndim > 2:
            found.append(args[0].detach().clone())

    for name, module in model.named_modules():
        if getattr(module, 'scaled_dot_product_attention', None) is nn.functional.scaled_dot_product_attention:
            module.scaled_dot_product_attention = unfused_attention
        if isinstance(module, nn.MultiheadAttention):
            separate = lambda module, args, kwargs: (args, {**kwargs, 'need_weights': True, 'average_attn_weights': False})
            handles += [
                module.register_forward_pre_hook(separate, with_kwargs=True),
                module.register_forward_hook(lambda module, args, output: found.append(output[1])),
            ]
        elif 'drop' in name.rpartition('.')[2]:
            handles.append(module.register_forward_pre_hook(before_dropout))
        elif name.endswith('talking_head2'):
            handles.append(module.register_forward_hook(lambda module, args, output: found.append(output)))

    def recording(softmax: Any) -> Any:
        def record(*args: Any, **kwargs: Any) -> Tensor:
            output: Tensor = softmax(*args, **kwargs)
            found.append(output.detach().clone())
            return output

        return record

    def recording_first(equation: str, *operands: Tensor) -> Tensor:
        found.append(operands[0].detach().clone())
        return torch.einsum(equation, *operands)

    with contextlib.ExitStack() as stack:
        fused = 'scaled_dot_product_attention'
        stack.enter_context(mock.patch.object(nn.functional, fused, unfused_attention))
        for module in {sys.modules[type(own).__module__] for own in model.modules()}:
            if 'einsum' in vars(module):
                stack.enter_context(mock.patch.object(module, 'einsum', recording_first))
        for owner in (torch, torch.Tensor, nn.functional):
            stack.enter_context(mock.patch.object(owner, 'softmax', recording(owner.softmax)))
        yield found
    for handle in handles:
        handle.remove()


def unfused_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: Optional[float] = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Computes what PyTorch documents of ``scaled_dot_product_attention``."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    bias = torch.zeros(query.shape[-2], key.shape[-2])
    if is_causal:
        bias.masked_fill_(~torch.ones_like(bias, dtype=torch.bool).tril(), -torch.inf)
    if attn_mask is not None:
        own = attn_mask.dtype == torch.bool
        bias = bias.masked_fill(~attn_mask, -torch.inf) if own else bias + attn_mask
    if enable_gqa:
        key, value = (own.repeat_interleave(query.shape[-3] // own.shape[-3], -3) for own in (key, value))
    return torch.softmax(query @ key.mT * scale + bias, -1) @ value


def distance(one: Tensor, others: List[Tensor]) -> float:
    """Returns how far maps are from those nearest to them, in any order of the batch; inf where none are of the size."""
    nearest = [float('inf')]
    for other in others:
        other = other if one.shape[-2:] == other.shape[-2:] else other.mT
        if one.numel() == other.numel() and one.shape[-2:] == other.shape[-2:]:
            own, its = one.flatten(0, -3).flatten(1), other.flatten(0, -3).flatten(1)
            nearest.append(torch.cdist(own, its, p=float('inf')).amin(1).max().item())
    return min(nearest)


def call(model: nn.Module, inputs: Any) -> Any:
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


def flat(output: Any) -> List[Tensor]:
    """Returns all tensors of an output."""
    if isinstance(output, Tensor):
        return [output]
    parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, (list, tuple)) else []
    return [own for part in parts for own in flat(part)]


@torch.no_grad()
def result(row: Row) -> Result:
    """Runs a model unwatched, watched and unfused."""
    from timm.layers import set_fused_attn

    model = enlarged(row.build(True))
    torch.manual_seed(1)
    inputs = torch.randn(row.inputs) if isinstance(row.inputs, torch.Size) else row.inputs
    maps: Dict[str, Tensor] = {}
    torch.manual_seed(2)
    before = flat(call(model, inputs))
    torch.manual_seed(2)
    with watching(model, lambda name, probs, places: maps.update({name: probs})):
        after = flat(call(model, inputs))
    changed = not all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(before, after))
    set_fused_attn(False)
    try:
        unfused = row.build(False)
    finally:
        set_fused_attn(True)
    unfused.load_state_dict(model.state_dict(), strict=False)  # which mmpretrain's Swin v2 refuses
    torch.manual_seed(2)
    unfused.eval()
    with computed(unfused) as own:
        official = row.own(unfused, inputs)
    differences = [distance(one, own + official) for one in maps.values()]
    differences = [one for one in differences if one < float('inf')]
    compared = len(differences)
    there = [distance(one, list(maps.values())) for one in official]
    differences += [one for one in there if one < float('inf')]
    try:
        rolled = 'yes' if rollout(model, inputs).isfinite().all() else 'not finite'
    except ValueError as error:
        rolled = str(error)
    return Result(len(maps), compared, max(differences, default=float('nan')), changed, rolled)


def hugging_face_row(name: str, settings: Dict[str, Any], inputs: Any, there: int) -> Row:
    """Returns a model of Hugging Face's transformers."""
    import transformers

    def build(fused: bool) -> nn.Module:
        kind = getattr(transformers, name)
        eager = {} if fused else dict(attn_implementation='eager')
        model: nn.Module = kind(kind.config_class(**copy.deepcopy(settings), **eager))
        return model

    def own(model: Any, inputs: Any) -> List[Tensor]:
        try:
            return attentions_of(model(**inputs, output_attentions=True))
        except TypeError:
            return call(model, inputs) and []

    return Row('Hugging Face', name, build, inputs, there, own)


def other_row(path: str, settings: Dict[str, Any], inputs: Any, there: int) -> Row:
    """Returns a model of a class anywhere."""
    module, _, name = path.rpartition('.')

    def build(fused: bool) -> nn.Module:
        model: nn.Module = getattr(importlib.import_module(module), name)(**copy.deepcopy(settings))
        return model

    return Row(path.partition('.')[0], path.partition('.')[2], build, inputs, there)


def attentions_of(output: Any) -> List[Tensor]:
    """Returns what an output of Hugging Face has in fields of attentions."""
    found: List[Tensor] = []
    for name, value in output.items():
        if 'attentions' in name:
            found += flat(value)
        elif hasattr(value, 'items'):
            found += attentions_of(value)
    return found


ROWS = [timm_row(*own) for own in TIMM] + [hugging_face_row(*own) for own in HUGGING_FACE] + [other_row(*own) for own in OTHERS]

if __name__ == '__main__':
    warnings.filterwarnings('ignore')
    globs = sys.argv[1:] or ['*']
    for row in ROWS:
        if any(fnmatch.fnmatch(f'{row.library}.{row.name}', glob) for glob in globs):
            try:
                print(row.library, row.name, row.there, *result(row), sep=' | ', flush=True)
            except Exception as error:
                if len(globs) == 1 and '*' not in globs[0]:
                    raise
                print(row.library, row.name, 'FAILED', type(error).__name__, str(error)[:300], flush=True)
