//! Decoders in GGUF: which architecture a file has, its settings from the metadata, and the table of its tensors.

use super::{Form, Layout, Mapped, gemma, llama};
use crate::files::gguf::{Gguf, MetadataValue};
use crate::{Architecture, Error, GptConfig, LocalLayers, ModelConfig, Result};

/// The number of layers of Gemma 3 27B, the one whose queries are not scaled by the width of a head.
const LAYERS_OF_27B: usize = 62;

/// Architectures by their names in files.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Decoder {
    /// Rows of queries and keys are permuted for adjacent rotary pairs.
    Llama,
    /// Rows are not permuted, and projections of queries, keys and values have biases.
    Qwen2,
    /// Text-only models.
    Gemma3,
}

impl Decoder {
    const ALL: [(&str, Decoder); 3] =
        [("llama", Decoder::Llama), ("qwen2", Decoder::Qwen2), ("gemma3", Decoder::Gemma3)];

    /// The parts of a layer: see [`llama::PARTS`].
    fn parts(self) -> &'static [[&'static str; 3]] {
        match self {
            Decoder::Llama | Decoder::Qwen2 => &llama::PARTS,
            Decoder::Gemma3 => &gemma::PARTS,
        }
    }
}

/// The metadata of a file under the name of its architecture.
struct Settings<'a> {
    file: &'a Gguf,
    kind: &'a str,
    decoder: Decoder,
}

impl<'a> Settings<'a> {
    fn of(file: &'a Gguf) -> Result<Self> {
        let name = "general.architecture";
        let kind = file.text(name)?;
        match Decoder::ALL.iter().find(|(known, _)| *known == kind) {
            Some(&(_, decoder)) => Ok(Settings { file, kind, decoder }),
            None => {
                let what = format!("it is `{kind}`, expected `llama`, `qwen2` or `gemma3`");
                Err(Error::format(file.path(), format!("value `{name}`"), what))
            }
        }
    }

    fn name(&self, name: &str) -> String {
        format!("{}.{name}", self.kind)
    }

    fn wrong(&self, name: &str, what: impl Into<String>) -> Error {
        Error::format(self.file.path(), format!("value `{}`", self.name(name)), what)
    }

    fn has(&self, name: &str) -> bool {
        self.file.values().contains_key(&self.name(name))
    }

    fn whole(&self, name: &str) -> Result<usize> {
        Ok(self.file.whole(&self.name(name))?)
    }

    fn whole_or(&self, name: &str, other: usize) -> Result<usize> {
        if self.has(name) { self.whole(name) } else { Ok(other) }
    }

    fn number_or(&self, name: &str, other: f64) -> Result<f64> {
        if self.has(name) { Ok(self.file.number(&self.name(name))?) } else { Ok(other) }
    }

    /// A whole number above 0.
    fn positive(&self, name: &str, other: Option<usize>) -> Result<usize> {
        match other.map_or_else(|| self.whole(name), |other| self.whole_or(name, other))? {
            0 => Err(self.wrong(name, "it is 0, expected at least 1")),
            found => Ok(found),
        }
    }

    /// Refuses settings that change the results and are not supported.
    fn refuse(&self) -> Result<()> {
        let scaling = "rope.scaling.type";
        if self.has(scaling) && self.file.text(&self.name(scaling))? != "none" {
            return Err(self.wrong(scaling, "scaled positions are not supported"));
        }
        for name in ["attn_logit_softcapping", "final_logit_softcapping"] {
            if self.number_or(name, 0.0)? != 0.0 {
                return Err(self.wrong(name, "logits that are capped are not supported"));
            }
        }
        Ok(())
    }

    fn sizes(&self) -> Result<GptConfig> {
        self.refuse()?;
        let heads = self.positive("attention.head_count", None)?;
        let width = self.whole("embedding_length")?;
        let key_heads = self.positive("attention.head_count_kv", Some(heads))?;
        if !heads.is_multiple_of(key_heads) {
            let what = format!("{key_heads} heads of keys do not divide {heads} heads of queries");
            return Err(self.wrong("attention.head_count_kv", what));
        }
        let head_width = self.whole_or("attention.key_length", width / heads)?;
        for (name, what) in [
            ("attention.value_length", "values of another width than keys are not supported"),
            ("rope.dimension_count", "heads of which only a part turns are not supported"),
        ] {
            if self.whole_or(name, head_width)? != head_width {
                return Err(self.wrong(name, what));
            }
        }
        let sizes = GptConfig {
            d_model: width,
            ffn_dim: self.whole("feed_forward_length")?,
            heads,
            key_heads: Some(key_heads),
            head_width: Some(head_width).filter(|&found| found.saturating_mul(heads) != width),
            layers: self.whole("block_count")?,
            max_positions: self.whole("context_length")?,
            epsilon: self.file.number(&self.name("attention.layer_norm_rms_epsilon"))?,
            tied: self.file.shape("output.weight").is_none(),
            ..match self.decoder {
                Decoder::Llama => llama::llama(),
                Decoder::Qwen2 => GptConfig { qkv_bias: Some(true), ..llama::llama() },
                Decoder::Gemma3 => gemma::gemma(),
            }
        };
        let rotary_base = self.number_or("rope.freq_base", sizes.rotary_base)?;
        let sizes = GptConfig { rotary_base, ..sizes };
        if self.decoder != Decoder::Gemma3 {
            return Ok(sizes);
        }
        let local = LocalLayers {
            window: self.positive("attention.sliding_window", None)?,
            period: self.positive("attention.sliding_window_pattern", Some(6))?,
            rotary_base: self.number_or("rope.freq_base_swa", 10_000.0)?,
        };
        let scalar = if sizes.layers == LAYERS_OF_27B { width / heads } else { head_width };
        let attention = gemma::attention(scalar as f64, head_width);
        Ok(GptConfig { attention, local: Some(local), ..sizes })
    }

    fn layout(&self, sizes: &GptConfig) -> Layout {
        let mut tensors = vec![Mapped::plain("token_embd.weight", "tokens.weight")];
        for layer in 0..sizes.layers.min(1 << 10) {
            for [_, theirs, ours] in self.decoder.parts() {
                let form = match (self.decoder, *theirs) {
                    (Decoder::Llama, "attn_q") => Form::Paired(sizes.heads),
                    (Decoder::Llama, "attn_k") => Form::Paired(sizes.key_heads()),
                    _ => Form::Plain,
                };
                let parts = vec![format!("layers.{layer}.{ours}.weight")];
                tensors.push(Mapped { name: format!("blk.{layer}.{theirs}.weight"), parts, form });
                if self.decoder == Decoder::Qwen2 && ["attn_q", "attn_k", "attn_v"].contains(theirs) {
                    let ours = format!("layers.{layer}.{ours}.bias");
                    tensors.push(Mapped::plain(format!("blk.{layer}.{theirs}.bias"), ours));
                }
            }
        }
        tensors.push(Mapped::plain("output_norm.weight", "norm.weight"));
        if !sizes.tied {
            tensors.push(Mapped::plain("output.weight", "lm_head.weight"));
        }
        Layout { prefix: "", tensors, ignored: &[] }
    }
}

/// Configuration and layout of a file.
pub(crate) fn decoder(file: &Gguf) -> Result<(ModelConfig, Layout)> {
    let settings = Settings::of(file)?;
    let sizes = settings.sizes()?;
    let vocab_size = file.texts("tokenizer.ggml.tokens")?.len();
    let token = |name: &str, other: u32| match file.values().contains_key(name) {
        true => {
            let id = file.whole(name)?;
            let wrong = |_| Error::format(file.path(), format!("value `{name}`"), format!("{id}"));
            u32::try_from(id).map_err(wrong)
        }
        false => Ok(other),
    };
    let eos = token("tokenizer.ggml.eos_token_id", 0)?;
    let config = ModelConfig {
        model_type: "qkv".into(),
        vocab_size,
        pad_token_id: token("tokenizer.ggml.padding_token_id", eos)?,
        bos_token_id: token("tokenizer.ggml.bos_token_id", eos)?,
        eos_token_id: eos,
        architecture: Architecture::Gpt(sizes.clone()),
    };
    Ok((config, settings.layout(&sizes)))
}

/// Control tokens that end an answer or a text, whichever of them a file names as its end token.
const ENDS: [&str; 5] = ["<end_of_turn>", "<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|end_of_text|>"];

/// The tokens that end an answer.
pub(crate) fn end_tokens(file: &Gguf) -> Vec<u32> {
    let (tokens, kinds) = (file.values().get("tokenizer.ggml.tokens"), file.values().get("tokenizer.ggml.token_type"));
    let (Some(MetadataValue::Texts(tokens)), Some(MetadataValue::Numbers(kinds))) = (tokens, kinds) else {
        return Vec::new();
    };
    let ends = |(_, (token, kind)): &(usize, (&String, &f64))| **kind == CONTROL && ENDS.contains(&token.as_str());
    tokens.iter().zip(kinds).enumerate().filter(ends).map(|(id, _)| id as u32).collect()
}

/// The type of control tokens.
const CONTROL: f64 = 3.0;
