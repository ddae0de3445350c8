//! Recipes: data, model and training of a run in one TOML file. Omitted settings have defaults, unknown ones are
//! rejected, and any setting can be changed on the command line by its path, as in `train.lr=3e-4`.

mod lora;
mod metric;
mod model_source;
mod parallel;
mod training;

pub use lora::Lora;
pub use metric::{Metric, Objective};
pub use model_source::{ModelSource, Pretrained};
pub use parallel::{Division, Parallel};
pub use training::Training;

use crate::architecture::Architecture;
use crate::files::input;
use crate::search::Search;
use crate::tasks::{SHORTEST_NEEDLES, ShapesTask, Task};
use crate::text::tokenizer::Kind;
use crate::{Error, Result, TransformerConfig};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// A recipe.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// Name of the run and, unless another is given, of its folder.
    pub name: String,
    /// Seed of all random numbers.
    #[serde(default = "one")]
    pub seed: u64,
    /// The training data.
    pub data: Data,
    /// The tokenizer.
    #[serde(default)]
    pub tokenizer: TokenizerSource,
    /// The model.
    #[serde(default = "transformer")]
    pub model: ModelSource,
    /// Low-rank adapters, trained instead of all weights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lora: Option<Lora>,
    /// Optimizer, schedule, validation and checkpoints.
    #[serde(default)]
    pub train: Training,
    /// What is sharded over ranks besides micro-batches.
    #[serde(default, skip_serializing_if = "Parallel::is_default")]
    pub parallel: Parallel,
    /// Settings of the search, for validation and inference.
    #[serde(default)]
    pub search: Search,
}

fn one() -> u64 {
    1
}

fn transformer() -> ModelSource {
    ModelSource::New(Architecture::Transformer(TransformerConfig::default()))
}

/// The training data: pairs, plain text, labelled texts or images, or a synthetic task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged, deny_unknown_fields)]
pub enum Data {
    /// Two files of lines `source ⇥ target`.
    Files {
        /// Training pairs.
        train: PathBuf,
        /// Validation pairs.
        dev: PathBuf,
    },
    /// Two files of plain text, for a language model.
    Text {
        /// Training text.
        text: PathBuf,
        /// Validation text.
        dev: PathBuf,
    },
    /// Two files of conversations in JSON Lines, for fine-tuning a decoder-only model: only the answers have a loss.
    Chat {
        /// Training conversations.
        chat: PathBuf,
        /// Validation conversations.
        dev: PathBuf,
        /// A file with a chat template, if not the model's.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        template: Option<PathBuf>,
    },
    /// Two files of lines `label ⇥ text`, for an encoder or a HAN.
    Classes {
        /// Training texts.
        classes: PathBuf,
        /// Validation texts.
        dev: PathBuf,
    },
    /// Two files of CoNLL columns, for an encoder.
    Tags {
        /// Training sentences.
        tags: PathBuf,
        /// Validation sentences.
        dev: PathBuf,
    },
    /// Two files of questions in SQuAD's JSON, for an encoder.
    Answers {
        /// Training questions.
        answers: PathBuf,
        /// Validation questions.
        dev: PathBuf,
    },
    /// Four files in MNIST's idx format, plain or `.gz`, for a vision model.
    Images {
        /// Training images.
        images: PathBuf,
        /// Their classes.
        labels: PathBuf,
        /// Validation images.
        dev_images: PathBuf,
        /// Their classes.
        dev_labels: PathBuf,
        /// Names of the classes; their numbers, if left out.
        #[serde(default)]
        names: Vec<String>,
    },
    /// Two lists of lines `image ⇥ text`, for a model that describes; paths are relative to the list's folder, and an
    /// image may have several texts.
    Captions {
        /// Training images.
        captions: PathBuf,
        /// Validation images.
        dev: PathBuf,
    },
    /// Two lists of lines `image ⇥ question ⇥ answer`, for a model that answers.
    Questions {
        /// Training questions.
        questions: PathBuf,
        /// Validation questions.
        dev: PathBuf,
    },
    /// Two files of images with boxes in COCO's JSON, for a detector; paths are relative to the file's folder.
    Boxes {
        /// Training images.
        boxes: PathBuf,
        /// Validation images.
        dev: PathBuf,
    },
    /// Two lists of lines `recording ⇥ text`, for a voice; paths are relative to the list's folder.
    Spoken {
        /// Training recordings.
        spoken: PathBuf,
        /// Validation recordings.
        dev: PathBuf,
    },
    /// Synthetic sounds, a tone for each letter, for a voice: see [`tones`](crate::tasks::tones()).
    Tones {
        /// Training texts.
        tones: usize,
        /// Validation texts.
        dev_tones: usize,
    },
    /// Synthetic pictures of shapes: see [`scenes`](crate::tasks::scenes()).
    Shapes {
        /// What is learned from them.
        shapes: ShapesTask,
        /// Training pictures.
        scenes: usize,
        /// Validation pictures.
        dev_scenes: usize,
    },
    /// Synthetic texts with a class, for an encoder: see [`needles`](crate::tasks::needles()).
    Needles {
        /// Letters per text.
        needles: usize,
        /// How often each of the two deciding characters is placed.
        #[serde(default = "once")]
        times: usize,
        /// Training texts.
        texts: usize,
        /// Validation texts.
        dev_texts: usize,
    },
    /// Questions about synthetic stories, for an encoder: see [`stories`](crate::tasks::stories()).
    Stories {
        /// Training stories, each with several questions.
        stories: usize,
        /// Validation stories.
        dev_stories: usize,
    },
    /// A synthetic task.
    Task {
        /// The task.
        task: Task,
        /// Training pairs.
        pairs: usize,
        /// Validation pairs.
        dev_pairs: usize,
    },
}

fn once() -> usize {
    1
}

/// Where the tokenizer comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, deny_unknown_fields)]
pub enum TokenizerSource {
    /// Read from a file.
    File {
        /// A `tokenizer.json`.
        file: PathBuf,
    },
    /// From the model that the run starts from, with more special tokens.
    Extended {
        /// Their names.
        special: Vec<String>,
    },
    /// Trained on the training data, source and target together.
    Train(Kind),
}

impl Default for TokenizerSource {
    fn default() -> Self {
        TokenizerSource::Train(Kind::Bpe { size: 8000 })
    }
}

impl Recipe {
    /// Reads a file and applies changes, each `path=value`.
    ///
    /// # Errors
    /// Names the file and the line or setting.
    pub fn read(path: impl AsRef<Path>, changes: &[String]) -> Result<Recipe> {
        Self::read_at(path.as_ref(), changes)
    }

    fn read_at(path: &Path, changes: &[String]) -> Result<Recipe> {
        let text = input::read_to_string(path, input::SETTINGS_MAX)?;
        Recipe::parse(&text, path, changes)
    }

    /// Parses a recipe; `path` is only for error messages.
    ///
    /// ```
    /// use qkv_models::Recipe;
    /// let text = "name = 'copy'\n[data]\ntask = 'copy'\npairs = 1000\ndev_pairs = 100\n";
    /// let recipe = Recipe::parse(text, "copy.toml".as_ref(), &["train.steps=50".into()])?;
    /// assert_eq!(recipe.train.steps, 50);
    /// let error = Recipe::parse(text, "copy.toml".as_ref(), &["train.stpes=50".into()]).unwrap_err();
    /// assert!(error.to_string().contains("stpes"));
    /// # Ok::<(), qkv_models::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`read`](Recipe::read).
    pub fn parse(text: &str, path: &Path, changes: &[String]) -> Result<Recipe> {
        let at = |error: &toml::de::Error, what: &str| match error.span() {
            Some(span) => {
                let line = text[..span.start.min(text.len())].matches('\n').count() + 1;
                Error::line(path, line, what)
            }
            None => Error::format(path, "recipe", what),
        };
        let mut table: toml::Table = toml::from_str(text).map_err(|e| at(&e, e.message()))?;
        for change in changes {
            set(&mut table, change)?;
        }
        // An error in the file names its line; once changes are applied, lines no longer match.
        let recipe: Recipe = if changes.is_empty() {
            toml::from_str(text).map_err(|e| at(&e, e.message()))?
        } else {
            toml::Value::Table(table).try_into().map_err(|e: toml::de::Error| {
                Error::invalid(format!("`{}` with {}: {}", path.display(), changes.join(", "), e.message()))
            })?
        };
        recipe.check()?;
        Ok(recipe)
    }

    /// The recipe as TOML that parses to the same recipe.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("a recipe is made of tables and plain values")
    }

    /// Checks that every setting is in its range.
    ///
    /// # Errors
    /// Names the setting and its range.
    pub fn check(&self) -> Result<()> {
        let refuse = |name: &str, found: String, expected: &str| {
            Err(Error::invalid(format!("`{name}` is {found}, expected {expected}")))
        };
        let train = &self.train;
        let name_is_plain =
            self.name.chars().all(|c| c.is_alphanumeric() || "-_.".contains(c)) && !self.name.is_empty();
        if !name_is_plain || self.name.starts_with('.') {
            return refuse("name", format!("`{}`", self.name), "letters, digits, `-`, `_`");
        }
        for (name, found) in
            [("train.steps", train.steps), ("train.validate", train.validate), ("train.save", train.save)]
        {
            if found == 0 {
                return refuse(name, "0".into(), "at least 1");
            }
        }
        for (name, found) in
            [("train.tokens", train.tokens), ("train.longest", train.longest), ("train.accumulate", train.accumulate)]
        {
            if found == 0 || found > 1 << 24 {
                return refuse(name, found.to_string(), "between 1 and 16777216");
            }
        }
        if let Data::Needles { needles, times, .. } = self.data {
            if !(SHORTEST_NEEDLES..=1 << 24).contains(&needles) {
                return refuse("data.needles", needles.to_string(), "between 4 and 16777216");
            }
            if !(1..=needles).contains(&times) {
                return refuse("data.times", times.to_string(), "between 1 and the letters of a text");
            }
        }
        let counts: &[(&str, usize)] = match self.data {
            Data::Task { pairs, dev_pairs, .. } => &[("data.pairs", pairs), ("data.dev_pairs", dev_pairs)],
            Data::Needles { texts, dev_texts, .. } => &[("data.texts", texts), ("data.dev_texts", dev_texts)],
            Data::Stories { stories, dev_stories } => &[("data.stories", stories), ("data.dev_stories", dev_stories)],
            Data::Tones { tones, dev_tones } => &[("data.tones", tones), ("data.dev_tones", dev_tones)],
            Data::Shapes { scenes, dev_scenes, .. } => &[("data.scenes", scenes), ("data.dev_scenes", dev_scenes)],
            _ => &[],
        };
        for &(name, found) in counts {
            // The data is generated before training starts and held in memory.
            let max = if name.contains("dev_") { 1 << 20 } else { 1 << 26 };
            if found == 0 || found > max {
                return refuse(name, found.to_string(), &format!("between 1 and {max}"));
            }
        }
        let (fits, said) = match self.data {
            Data::Text { .. } | Data::Chat { .. } | Data::Spoken { .. } | Data::Tones { .. } => {
                (train.metric == Metric::Loss, "`loss`")
            }
            Data::Files { .. } | Data::Task { .. } => (train.metric != Metric::F1, "`bleu`, `chrf`, `exact` or `loss`"),
            Data::Captions { .. } | Data::Shapes { shapes: ShapesTask::Captions, .. } => {
                (train.metric != Metric::Chrf, "`bleu`, `f1` (edit similarity), `exact` or `loss`")
            }
            _ => (!matches!(train.metric, Metric::Bleu | Metric::Chrf), "`f1`, `exact` or `loss`"),
        };
        if !fits {
            let found = format!("{:?}", train.metric).to_lowercase();
            return Err(Error::invalid(format!("`train.metric` is {found}, which such data has not"))
                .with_hint(format!("set it to {said}")));
        }
        if !(train.lr > 0.0 && train.lr.is_finite()) {
            return refuse("train.lr", train.lr.to_string(), "above 0");
        }
        let shares = [
            ("train.smoothing", train.smoothing),
            ("train.expected", train.expected),
            ("train.average", train.average),
            ("train.word_dropout", train.word_dropout),
            ("train.bpe_dropout", train.bpe_dropout),
        ];
        for (name, found) in shares {
            if !(0.0..1.0).contains(&found) {
                return refuse(name, found.to_string(), "at least 0 and less than 1");
            }
        }
        for (name, found) in [
            ("train.erase", train.erase),
            ("train.mixup", train.mixup),
            ("train.zoom", train.zoom),
            ("train.color", train.color),
        ] {
            if !(0.0..=1.0).contains(&found) {
                return refuse(name, found.to_string(), "between 0 and 1");
            }
        }
        if train.shift > 1 << 10 {
            return refuse("train.shift", train.shift.to_string(), "at most 1024");
        }
        if !(train.reinforce >= 0.0 && train.reinforce.is_finite()) {
            return refuse("train.reinforce", train.reinforce.to_string(), "at least 0");
        }
        if !(train.clip >= 0.0 && train.clip.is_finite()) {
            return refuse("train.clip", train.clip.to_string(), "at least 0");
        }
        if !(train.layer_decay > 0.0 && train.layer_decay <= 1.0) {
            return refuse("train.layer_decay", train.layer_decay.to_string(), "above 0 and at most 1");
        }
        if train.objective == Some(Objective::Mlm) && !matches!(self.data, Data::Text { .. }) {
            return Err(Error::invalid("`train.objective` is `mlm`, which learns from plain text")
                .with_hint("set `data.text` and `data.dev`"));
        }
        if let Some(lora) = &self.lora {
            lora.check()?;
            if train.last_layers > 0 {
                return Err(Error::invalid("`train.last_layers` cannot be set beside `[lora]`")
                    .with_hint("name matrices of those layers in `lora.targets`, as in `layers.11.*`"));
            }
        }
        if matches!(self.tokenizer, TokenizerSource::Extended { .. }) && self.model.pretrained().is_none() {
            return Err(Error::invalid("`tokenizer.special` extends the tokenizer of `model.from`, which is not set"));
        }
        if let (TokenizerSource::File { .. }, Some(_)) = (&self.tokenizer, self.model.pretrained()) {
            return Err(Error::invalid(
                "`tokenizer.file` cannot be set beside `model.from`: the model has its tokenizer",
            )
            .with_hint("leave it out; `tokenizer.special` adds tokens"));
        }
        self.parallel.check()?;
        self.model.check()?;
        self.search.check()
    }
}

/// Sets `a.b.c=value` in a table. The value is parsed as TOML; if that fails, it is a string.
fn set(table: &mut toml::Table, change: &str) -> Result<()> {
    let wrong = || Error::invalid(format!("`{change}` is no change")).with_hint("write it as `train.lr=3e-4`");
    let (path, value) = change.split_once('=').ok_or_else(wrong)?;
    let value = value.trim();
    let parsed: Result<toml::Table, _> = toml::from_str(&format!("value = {value}"));
    let value = match parsed {
        Ok(mut parsed) => parsed.remove("value").ok_or_else(wrong)?,
        Err(_) if !value.is_empty() && value.bytes().all(|b| b.is_ascii_digit() || b"+-_".contains(&b)) => {
            let what = format!("`{}` is {value}, expected a whole number up to {}", path.trim(), i64::MAX);
            return Err(Error::invalid(what));
        }
        Err(_) => toml::Value::String(value.to_owned()),
    };
    let keys: Vec<&str> = path.trim().split('.').collect();
    if keys.iter().any(|key| key.is_empty()) {
        return Err(wrong());
    }
    let (last, above) = keys.split_last().ok_or_else(wrong)?;
    let mut table = table;
    for key in above {
        let entry = table.entry(*key).or_insert_with(|| toml::Value::Table(toml::Table::new()));
        table = entry
            .as_table_mut()
            .ok_or_else(|| Error::invalid(format!("`{key}` in `{change}` is a value, not a table of settings")))?;
    }
    table.insert((*last).to_owned(), value);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const COPY: &str = "name = 'copy'\n\n[data]\ntask = 'copy'\npairs = 10\ndev_pairs = 2\n";

    #[test]
    fn a_recipe_comes_back_from_its_own_file() {
        let text = format!(
            "{COPY}\n[model]\nkind = 'recurrent'\nattention = {{ score = 'general', mask = {{ window = {{ left = 2, right = 2 }} }} }}\n[search.sample]\ntop_k = 5\n"
        );
        let recipe = Recipe::parse(&text, Path::new("a.toml"), &[]).unwrap();
        let again = Recipe::parse(&recipe.to_toml(), Path::new("b.toml"), &[]).unwrap();
        assert_eq!(recipe, again);
        let ModelSource::New(Architecture::Recurrent(model)) = &recipe.model else { panic!("{:?}", recipe.model) };
        assert_eq!(model.attention.score, qkv::Score::General);
    }

    #[test]
    fn a_model_comes_from_sizes_or_from_a_path() {
        let from = |model: &str| Recipe::parse(&format!("{COPY}\n[model]\n{model}\n"), Path::new("a.toml"), &[]);
        let recipe = from("from = 'runs/a'\ndropout = 0.2").unwrap();
        assert_eq!(recipe.model.pretrained().map(|model| model.dropout), Some(Some(0.2)));
        assert_eq!(Recipe::parse(&recipe.to_toml(), Path::new("b.toml"), &[]).unwrap(), recipe);
        for (wrong, said) in [
            ("from = 'a'\nkind = 'gpt'", "`kind` cannot be set beside `from`"),
            ("from = 'a'\nd_model = 3", "unknown field `d_model`"),
            ("from = 'a'\ndropout = 1.0", "`model.dropout` is 1"),
            ("kind = 'gpt'\ndmodel = 3", "unknown field `dmodel`"),
            ("from = 'a'\n[tokenizer]\nfile = 'b'", "`tokenizer.file` cannot be set beside `model.from`"),
        ] {
            assert!(from(wrong).unwrap_err().to_string().contains(said), "{wrong}");
        }
    }

    #[test]
    fn what_is_misspelled_is_refused_with_its_line() {
        let error = Recipe::parse(&format!("{COPY}[train]\nstpes = 4\n"), Path::new("a.toml"), &[]).unwrap_err();
        let said = error.to_string();
        assert!(said.starts_with("a.toml:8") && said.contains("stpes"), "{said}");
        let error = Recipe::parse(&format!("{COPY}[train]\nsteps = 'many'\n"), Path::new("a.toml"), &[]).unwrap_err();
        assert!(error.to_string().starts_with("a.toml:8"), "{error}");
        let error = Recipe::parse("name = ", Path::new("a.toml"), &[]).unwrap_err();
        assert!(error.to_string().starts_with("a.toml:1"), "{error}");
    }

    #[test]
    fn changes_reach_any_depth_and_wrong_ones_are_refused() {
        let changes = |changes: &[&str]| {
            let changes: Vec<String> = changes.iter().map(|&x| x.to_owned()).collect();
            Recipe::parse(COPY, Path::new("a.toml"), &changes)
        };
        let recipe =
            changes(&["train.adam.beta2=0.95", "name=other", "model.kind=recurrent", "train.lr = 3e-4"]).unwrap();
        assert_eq!((recipe.train.adam.beta2, recipe.name.as_str(), recipe.train.lr), (0.95, "other", 3e-4));
        for wrong in [
            "lr",
            "=3",
            "name.x=3",
            "train.lr=-1",
            "train..lr=1",
            "name=../up",
            "train.steps=0",
            "train.steps=18446744073709551616",
            "data.pairs=100000000000",
        ] {
            assert!(changes(&[wrong]).is_err(), "{wrong}");
        }
        let beyond = changes(&["train.steps=18446744073709551616"]).unwrap_err();
        let expected = "`train.steps` is 18446744073709551616, expected a whole number up to 9223372036854775807";
        assert_eq!((beyond.to_string().as_str(), beyond.hint()), (expected, None));
    }
}
