//! Models that generate text, as files: a folder in the Hugging Face layout (ours, GPT-2's or Llama's, in one weights
//! file or in shards) or a GGUF file. Names of files are in [`files::folder`](crate::files::folder), names of tensors
//! in [`layout`](crate::layout). The checkpoints that training resumes from are in `train::checkpoint`.

use crate::adapters;
use crate::chat::{self, Template};
use crate::files::folder::{self, CONFIG, GENERATION_CONFIG, TOKENIZER, TOKENIZER_CONFIG, WEIGHTS};
use crate::files::gguf::{Gguf, MetadataValue};
use crate::files::input;
use crate::files::tensors::{NamedTensor, Storage, TensorFile};
use crate::files::weights::Weights;
use crate::layout::{Dialect, Layout, gguf};
use crate::text::tokenizer::Tokenizer;
use crate::{Error, Model, ModelConfig, Result};
use qkv_nn::Parameters;
use std::path::Path;

/// A model with zeroed parameters, and the layout that fills them from a file.
pub(crate) type Blank<M> = (M, Parameters<f32>, Layout);

/// A model that was read from files.
#[derive(Debug)]
pub(crate) struct Checkpoint {
    pub model: Model,
    pub parameters: Parameters<f32>,
    pub tokenizer: Tokenizer,
    pub template: Option<Template>,
    /// The contents of `generation_config.json`.
    pub generation: Option<serde_json::Value>,
}

/// The files of a model: its configuration and its tensors, not yet read into parameters.
pub(crate) struct ModelFiles {
    pub config: ModelConfig,
    pub dialect: Dialect,
    pub weights: Weights,
    /// The layout, if it is known before the model is built.
    layout: Option<Layout>,
}

/// Whether a path names a GGUF file.
pub(crate) fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|end| end.eq_ignore_ascii_case("gguf"))
}

impl ModelFiles {
    /// Opens a folder or a GGUF file.
    pub fn open(path: &Path) -> Result<ModelFiles> {
        if is_gguf(path) {
            let file = Gguf::open(path)?;
            let (config, layout) = gguf::decoder(&file)?;
            let (dialect, weights, layout) = (Dialect::of(&config), Weights::Gguf(file), Some(layout));
            return Ok(ModelFiles { config, dialect, weights, layout });
        }
        let config = path.join(CONFIG);
        let (config, dialect) = Dialect::read(&input::read(&config, input::SETTINGS_MAX)?, &config)?;
        Ok(ModelFiles { config, dialect, weights: Weights::of_folder(path)?, layout: None })
    }

    /// The layout of its tensors, unless their names are our own.
    pub fn known_layout(&self) -> Option<Layout> {
        self.layout.clone().or_else(|| self.dialect.layout(&self.config))
    }

    /// Builds the model with zeroed parameters.
    pub fn build(&self, path: &Path) -> Result<Blank<Model>> {
        let settings = if is_gguf(path) { path.to_owned() } else { path.join(CONFIG) };
        // A model that claims to be larger than its file is refused before memory is allocated for it.
        self.config.check_size(self.weights.numbers()).map_err(|e| e.in_file(&settings))?;
        let (model, parameters) = Model::blank(&self.config).map_err(|e| e.in_file(&settings))?;
        let layout = self.known_layout().unwrap_or_else(|| Layout::own(&parameters));
        Ok((model, parameters, layout))
    }
}

impl Checkpoint {
    /// Reads a folder or a GGUF file; adapters are attached to the model.
    pub fn open(path: &Path, adapter: Option<&Path>) -> Result<Checkpoint> {
        let (base, adapter) = adapters::resolve(path, adapter)?;
        let mut read = Checkpoint::of_model(&base)?;
        if let Some(adapter) = adapter {
            let config = read.model.config();
            let layout = Dialect::of(config).layout(config).unwrap_or_else(|| Layout::own(&read.parameters));
            adapters::read(&adapter, &mut read.parameters, &layout)?;
            // The run that trained the adapters may have another template.
            read.template = chat::of_folder(&adapter)?.or(read.template);
        }
        Ok(read)
    }

    fn of_model(path: &Path) -> Result<Checkpoint> {
        let files = ModelFiles::open(path)?;
        let (model, mut parameters, layout) = files.build(path)?;
        let TextSettings { tokenizer, template, generation } = TextSettings::of(path, &files.weights)?;
        if tokenizer.len() > files.config.vocab_size {
            let (tokens, rows) = (tokenizer.len(), files.config.vocab_size);
            let what = format!("the tokenizer has {tokens} tokens, the model {rows}");
            return Err(Error::format(path, "vocabulary", what));
        }
        layout.fill(&mut parameters, &files.weights)?;
        Ok(Checkpoint { model, parameters, tokenizer, template, generation })
    }
}

/// The text settings in a model's files: tokenizer, chat template, and the contents of `generation_config.json`. In
/// place of the last, a GGUF file has only the tokens that end an answer.
pub(crate) struct TextSettings {
    pub tokenizer: Tokenizer,
    pub template: Option<Template>,
    pub generation: Option<serde_json::Value>,
}

impl TextSettings {
    /// Reads the settings of a folder or a GGUF file with these weights.
    pub fn of(path: &Path, weights: &Weights) -> Result<TextSettings> {
        let Weights::Gguf(file) = weights else {
            return Ok(TextSettings {
                tokenizer: Tokenizer::open(path.join(TOKENIZER))?,
                template: chat::of_folder(path)?,
                generation: folder::read_json_if_present(&path.join(GENERATION_CONFIG))?,
            });
        };
        let template = match file.values().get("tokenizer.chat_template") {
            Some(MetadataValue::Text(source)) => Some(Template::new(source, path)?),
            _ => None,
        };
        let generation = Some(serde_json::json!({ "eos_token_id": gguf::end_tokens(file) }));
        Ok(TextSettings { tokenizer: Tokenizer::of_gguf(file)?, template, generation })
    }
}

/// Writes `config.json` and `model.safetensors`, in the layout of `transformers` if the model is a GPT-2, a Llama, a
/// Qwen2 or a Gemma 3.
pub(crate) fn write_model(model: &Model, parameters: &Parameters<f32>, to: &Path, storage: Storage) -> Result<()> {
    let dialect = Dialect::of(model.config());
    let layout = dialect.layout(model.config()).unwrap_or_else(|| Layout::own(parameters));
    layout.write(&to.join(WEIGHTS), parameters, storage)?;
    Ok(folder::write_json(&to.join(CONFIG), &dialect.write(model.config()))?)
}

/// Writes `tokenizer.json` and a `tokenizer_config.json` that tells `transformers` to use it as it is: from the model
/// type alone it would choose another tokenizer class.
pub(crate) fn write_tokenizer(tokenizer: &Tokenizer, template: Option<&Template>, to: &Path) -> Result<()> {
    tokenizer.save(to.join(TOKENIZER))?;
    let name = |id: u32| tokenizer.name(id);
    let mut settings = serde_json::json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": name(tokenizer.bos()),
        "eos_token": name(tokenizer.eos()),
        "pad_token": name(tokenizer.pad()),
        "clean_up_tokenization_spaces": false,
    });
    if let Some(unknown) = tokenizer.unk().and_then(name) {
        settings["unk_token"] = unknown.into();
    }
    if let Some(template) = template {
        settings["chat_template"] = template.source().into();
    }
    Ok(folder::write_json(&to.join(TOKENIZER_CONFIG), &settings)?)
}

/// Reads the trained parameters under their own names. The file must have all of them, in their shapes, and no tensor
/// that is not a parameter of the model.
pub(crate) fn read_parameters(parameters: &mut Parameters<f32>, file: &TensorFile) -> Result<()> {
    let all: Vec<_> = parameters.trained().collect();
    for param in &all {
        let values = file.read_shaped(parameters.name(*param), parameters.shape(*param))?;
        parameters.get_mut(*param).copy_from_slice(&values);
    }
    if let Some(name) = file.names().find(|name| parameters.find(name).is_none()) {
        let part = format!("tensor `{name}`");
        return Err(Error::format(file.path(), part, "the model has no such parameter"));
    }
    Ok(())
}

/// The trained parameters, as tensors under their own names.
pub(crate) fn trained_tensors(parameters: &Parameters<f32>) -> Vec<NamedTensor<'_>> {
    let tensor = |param| NamedTensor {
        name: parameters.name(param),
        shape: parameters.shape(param),
        values: parameters.get(param),
    };
    parameters.trained().map(tensor).collect()
}
