//! The layout of pix2tex, which reads formulas: `settings/config.yaml`, `dataset/tokenizer.json`, and a PyTorch
//! checkpoint, `checkpoints/weights.pth`. A ResNet with weight-standardized convolutions (Qiao et al. 2019,
//! arXiv:1903.10520) and group norms, a ViT over its features, and a Transformer decoder whose feed-forward layers and
//! attentions have gates. Convolution weights are standardized once, when they are read.

use super::config::Fields;
use super::{Form, Layout, Mapped, latex_ocr};
use crate::batch::SpecialTokens;
use crate::conv_stem::Stem;
use crate::describe::DescribeConfig;
use crate::files::folder::read_json;
use crate::files::torch::TorchFile;
use crate::files::weights::Weights;
use crate::files::{input, yaml};
use crate::image::Fit;
use crate::resnet_stem::norm_after;
use crate::text::tokenizer::Tokenizer;
use crate::{Architecture, Error, ImageEncoderConfig, ModelConfig, Result};
use qkv_formats::numbers;
use qkv_nn::Parameters;
use qkv_nn::layers::{FeedKind, Norm, PositionKind};
use serde_json::{Value, json};
use std::path::Path;

const SETTINGS: &str = "settings/config.yaml";
const TOKENIZER: &str = "dataset/tokenizer.json";
const CHECKPOINT: &str = "checkpoints/weights.pth";
/// The largest file of settings, in bytes.
const LARGEST_SETTINGS: u64 = 1 << 20;
/// Mean and standard deviation of the images it was trained on.
const MEAN: f64 = 0.7931;
const DEVIATION: f64 = 0.1738;
/// `ε` of the norms of the ViT, and of the standard deviations of weights.
const IMAGE_EPSILON: f64 = 1e-6;
const WEIGHT_EPSILON: f64 = 1e-5;
/// Channels of the first convolution.
const STEM_CHANNELS: usize = 64;
/// Width of a head of the decoder.
const HEAD_WIDTH: usize = 64;

/// Whether a folder has this layout.
pub(crate) fn is_in(folder: &Path) -> bool {
    [SETTINGS, TOKENIZER, CHECKPOINT].iter().all(|file| folder.join(file).exists())
}

/// The configuration of a folder.
pub(crate) fn config(folder: &Path) -> Result<ModelConfig> {
    let path = folder.join(SETTINGS);
    let bytes = input::read(&path, LARGEST_SETTINGS)?;
    let text = std::str::from_utf8(&bytes).map_err(|e| Error::format(&path, "settings", e.to_string()))?;
    let settings = yaml::parse(text).map_err(|(line, what)| Error::line(&path, line, what))?;
    let fields = Fields { json: &settings, path: &path };
    let none = json!({});
    let decoder = Fields { json: settings.get("decoder_args").unwrap_or(&none), path: &path };
    for name in ["use_scalenorm", "rel_pos_bias", "rotary_pos_emb", "use_rmsnorm"] {
        if decoder.flag(name, false)? {
            return Err(decoder.wrong(name, "decoders with it are not read"));
        }
    }
    let blocks = settings.get("backbone_layers").and_then(Value::as_array);
    let blocks: Option<Vec<usize>> =
        blocks.and_then(|list| list.iter().map(|count| count.as_u64().map(|count| count as usize)).collect());
    let image = ImageEncoderConfig {
        height: fields.needed(&["max_height"])?,
        width: fields.needed(&["max_width"])?,
        channels: fields.needed(&["channels"])?,
        fit: Fit::Trim,
        stem: Stem::ResNet,
        patch_size: fields.needed(&["patch_size"])?,
        stem_channels: STEM_CHANNELS,
        stem_blocks: blocks.ok_or_else(|| fields.wrong("backbone_layers", "it is no list of numbers"))?,
        layers: fields.needed(&["encoder_depth"])?,
        mean: vec![MEAN],
        deviation: vec![DEVIATION],
        class_token: true,
        epsilon: Some(IMAGE_EPSILON),
        ..ImageEncoderConfig::default()
    };
    let d_model = fields.needed(&["dim"])?;
    let sizes = DescribeConfig {
        image,
        d_model,
        ffn_dim: d_model.saturating_mul(4),
        heads: fields.needed(&["heads"])?,
        decoder_layers: fields.needed(&["num_layers"])?,
        max_positions: fields.needed(&["max_seq_len"])?,
        dropout: 0.0,
        positions: PositionKind::Learned,
        tied: false,
        epsilon: Norm::EPSILON,
        output_bias: true,
        activation: if decoder.flag("ff_glu", false)? { FeedKind::GeGlu } else { FeedKind::Gelu },
        head_width: Some(decoder.whole(&["attn_dim_head"])?.unwrap_or(HEAD_WIDTH)),
        attention_bias: false,
        gated_attention: decoder.flag("attn_on_attn", false)?,
        ..DescribeConfig::default()
    };
    let specials = SpecialTokens::of(&tokenizer(folder)?);
    Ok(ModelConfig::new(Architecture::Describe(sizes), fields.needed(&["num_tokens"])?, specials))
}

/// Its tokenizer, whose file names neither the kind of model nor how pieces become text.
pub(crate) fn tokenizer(folder: &Path) -> Result<Tokenizer> {
    let path = folder.join(TOKENIZER);
    let mut json: Value = read_json(&path)?;
    if let Some(model) = json.get_mut("model").and_then(Value::as_object_mut) {
        model.entry("type").or_insert(json!("BPE"));
    }
    if json.get("decoder").is_none_or(Value::is_null) {
        json["decoder"] = json!({ "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true });
    }
    Ok(Tokenizer::from_bytes(json.to_string().as_bytes(), &path)?)
}

/// The weights of a folder.
pub(crate) fn weights(folder: &Path) -> Result<Weights> {
    Ok(Weights::Torch(TorchFile::open(folder.join(CHECKPOINT))?))
}

/// The table of tensors.
pub(crate) fn layout(config: &DescribeConfig) -> Layout {
    let DescribeConfig { d_model, ref image, .. } = *config;
    let formed = |name: &str, part: &str, form| Mapped { form, ..Mapped::plain(name, part) };
    let stem = image.resnet_stem();
    let mut tensors = vec![
        formed("encoder.cls_token", "image.class_token", Form::Axes([0, 1, 1, d_model])),
        formed("encoder.pos_embed", "image.positions.weight", Form::Axes([0, 1, image.places() + 1, d_model])),
        formed(
            "encoder.patch_embed.proj.weight",
            "image.patches.weight",
            Form::Kernels([d_model, stem.outputs(), 1, 1]),
        ),
        Mapped::plain("encoder.patch_embed.proj.bias", "image.patches.bias"),
        Mapped::plain("decoder.net.token_emb.weight", "decoder.embed_tokens.weight"),
        Mapped::plain("decoder.net.pos_emb.emb.weight", "decoder.embed_tokens.positions.weight"),
    ];
    let theirs = |ours: &str| {
        let name = ours.replace("shortcut", "downsample");
        let name = match name.strip_prefix("stem.stages.").and_then(|rest| rest.split_once('.')) {
            Some((stage, rest)) => format!("stages.{stage}.blocks.{rest}"),
            None => name,
        };
        format!("encoder.patch_embed.backbone.{name}")
    };
    for (conv, [inputs, outputs, kernel]) in stem.convolutions() {
        let form = Form::Kernels([outputs, inputs, kernel, kernel]);
        tensors.push(formed(&format!("{}.weight", theirs(&conv)), &format!("image.{conv}.weight"), form));
        let norm = norm_after(&conv);
        for kind in ["weight", "bias"] {
            tensors.push(Mapped::plain(format!("{}.{kind}", theirs(&norm)), format!("image.{norm}.{kind}")));
        }
    }
    // Each of their tensors is one or several of ours, stacked.
    let mut both = |theirs: String, ours: &[String], kinds: &[&str]| {
        for kind in kinds {
            let parts = ours.iter().map(|ours| format!("{ours}.{kind}")).collect();
            tensors.push(Mapped { name: format!("{theirs}.{kind}"), parts, form: Form::Plain });
        }
    };
    const ALL: &[&str] = &["weight", "bias"];
    both("encoder.norm".into(), &["image.norm".into()], ALL);
    both("decoder.net.norm".into(), &["decoder.layer_norm".into()], ALL);
    both("decoder.net.to_logits".into(), &["lm_head".into()], ALL);
    for layer in 0..image.layers {
        let (theirs, ours) = (format!("encoder.blocks.{layer}"), format!("image.layers.{layer}"));
        for (their, our) in [
            ("norm1", "self_attn_layer_norm"),
            ("norm2", "final_layer_norm"),
            ("attn.proj", "self_attn.out_proj"),
            ("mlp.fc1", "fc1"),
            ("mlp.fc2", "fc2"),
        ] {
            both(format!("{theirs}.{their}"), &[format!("{ours}.{our}")], ALL);
        }
        let stacked = ["q", "k", "v"].map(|part| format!("{ours}.self_attn.{part}_proj"));
        both(format!("{theirs}.attn.qkv"), &stacked, ALL);
    }
    for layer in 0..config.decoder_layers {
        let ours = format!("decoder.layers.{layer}");
        let at = |part: usize, rest: &str| format!("decoder.net.attn_layers.layers.{}.{rest}", 3 * layer + part);
        for (part, attention) in ["self_attn", "encoder_attn"].into_iter().enumerate() {
            let ours = format!("{ours}.{attention}");
            both(at(part, "0"), &[format!("{ours}_layer_norm")], ALL);
            for projection in ["q", "k", "v"] {
                both(at(part, &format!("1.to_{projection}")), &[format!("{ours}.{projection}_proj")], &["weight"]);
            }
            let out = format!("{ours}.out_proj");
            match config.gated_attention {
                true => both(at(part, "1.to_out.0"), &[out, format!("{ours}.out_gate")], ALL),
                false => both(at(part, "1.to_out"), &[out], ALL),
            }
        }
        both(at(2, "0"), &[format!("{ours}.final_layer_norm")], ALL);
        match config.activation {
            FeedKind::GeGlu => {
                both(at(2, "1.net.0.proj"), &[format!("{ours}.fc1"), format!("{ours}.gate")], ALL);
            }
            _ => both(at(2, "1.net.0.0"), &[format!("{ours}.fc1")], ALL),
        }
        both(at(2, "1.net.2"), &[format!("{ours}.fc2")], ALL);
    }
    Layout { prefix: "", tensors, ignored: &[] }
}

/// Converts the tensors that were read to our parameters: divides the embedding by the factor that ours is multiplied
/// by, and standardizes each output channel of the stem's convolutions by its mean and standard deviation.
pub(crate) fn finish(parameters: &mut Parameters<f32>, config: &DescribeConfig) {
    latex_ocr::unscale(parameters, config.d_model);
    for (conv, [_, outputs, _]) in config.image.resnet_stem().convolutions() {
        let Some(weight) = parameters.find(&format!("image.{conv}.weight")) else { continue };
        let values = parameters.get_mut(weight);
        let each = values.len() / outputs.max(1);
        for channel in values.chunks_exact_mut(each.max(1)) {
            numbers::standardize(channel, WEIGHT_EPSILON);
        }
    }
}
