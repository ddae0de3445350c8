//! A model that describes images, with its parameters and tokenizer: its folder, its loss, descriptions by beam search,
//! and where it looked for each token.

use super::DescribeConfig;
use crate::batch::{Batch, SpecialTokens};
use crate::checkpoint::Blank;
use crate::eyes::{self, Eyes};
use crate::files::folder::{CONFIG, GENERATION_CONFIG, TOKENIZER, read_json, read_json_if_present, write_json};
use crate::files::tensors::Storage;
use crate::files::weights::Weights;
use crate::image::Image;
use crate::image_encoder::ImageEncoder;
use crate::layout::formulas::FormulaReader;
use crate::layout::{self, Inspected, Layout};
use crate::model::Group;
use crate::observed_attention::{ObservedAttention, observed};
use crate::own_folder;
use crate::provenance::Provenance;
use crate::search::Search;
use crate::start::Start;
use crate::text::tokenizer::Tokenizer;
use crate::{Architecture, Error, Model, ModelConfig, Result};
use qkv_nn::layers::Builder;
use qkv_nn::{Machine, Parameters, PendingLoss, Pool, Tape, Var};
use std::path::Path;

/// Images that are described in one batch.
const TOGETHER: usize = 16;

/// A model that describes images.
#[derive(Debug)]
pub struct Describer {
    /// Its configuration.
    pub config: DescribeConfig,
    /// Its parameters.
    pub parameters: Parameters<f32>,
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
    /// Default settings of the search.
    pub search: Search,
    eyes: Option<Eyes>,
    pub(crate) network: DescribeNetwork,
}

/// Handles to the parameters of the image encoder and of the decoder.
#[derive(Clone, Debug)]
pub(crate) struct DescribeNetwork {
    image: ImageEncoder,
    pub decoder: Model,
}

impl DescribeNetwork {
    fn new(at: &mut Builder<'_, f32>, whole: &ModelConfig) -> Result<DescribeNetwork> {
        let Architecture::Describe(config) = &whole.architecture else {
            return Err(Error::invalid(format!("a model of kind `{}` describes nothing", whole.architecture.name())));
        };
        config.check()?;
        let image = ImageEncoder::new(&mut at.at("image"), &config.image, config.widths())?;
        Ok(DescribeNetwork { image, decoder: Model::decoder(whole, at)? })
    }
}

/// A description of an image.
#[derive(Clone, Debug, PartialEq)]
pub struct Description {
    /// The text.
    pub text: String,
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// The score it was ranked by.
    pub score: f64,
    /// Its log-probability.
    pub log_probability: f64,
}

/// Where a model looked as it generated text: attention weights over the places of an image.
#[derive(Clone, Debug)]
pub struct LookedAt {
    /// The image, as the model saw it.
    pub image: Image,
    /// Rows and columns of places.
    pub grid: [usize; 2],
    /// The tokens of the text, the end token last.
    pub tokens: Vec<u32>,
    /// For each token, the weight of each place, row by row: the mean over the heads of the layer that aligns best.
    pub weights: Vec<Vec<f32>>,
    /// All attentions: of the image encoder, of the decoder to itself, of the decoder to the image.
    pub attentions: Vec<ObservedAttention>,
}

/// Configuration and weights of a folder, and the model with zeroed parameters if it can be built.
fn found(folder: &Path) -> Result<(ModelConfig, DescribeConfig, Weights, Result<Blank<DescribeNetwork>>)> {
    let foreign = FormulaReader::of(folder);
    let path = folder.join(CONFIG);
    let whole: ModelConfig = match foreign {
        Some(foreign) => foreign.config(folder)?,
        None => read_json(&path)?,
    };
    let Architecture::Describe(config) = whole.architecture.clone() else {
        let what = format!("it is a {}, expected `describe`", whole.architecture.name());
        return Err(Error::format(&path, "field `architecture.kind`", what));
    };
    let weights = match foreign {
        Some(foreign) => foreign.weights(folder)?,
        None => Weights::of_folder(folder)?,
    };
    let built = || {
        whole.check_size(weights.numbers()).map_err(|e| e.in_file(&path))?;
        let mut parameters = Parameters::new();
        let network =
            DescribeNetwork::new(&mut Builder::blank(&mut parameters), &whole).map_err(|e| e.in_file(&path))?;
        let layout = foreign.map_or_else(|| Layout::own(&parameters), |foreign| foreign.layout(&config));
        Ok((network, parameters, layout))
    };
    let built = built();
    Ok((whole, config, weights, built))
}

/// Description, number of parameters, mismatches and weights of a folder.
pub(crate) fn inspect(folder: &Path) -> Result<Inspected> {
    let (whole, config, weights, built) = found(folder)?;
    let DescribeConfig { d_model, decoder_layers, ref image, .. } = config;
    let seen = format!("images of {} × {} in {} places", image.width, image.height, image.places());
    let words = format!(
        "describe: {seen}, {} layers; {:?} decoder of {decoder_layers} layers, width {d_model}, vocabulary {}",
        image.layers, config.decoder, whole.vocab_size
    );
    Ok(layout::inspected(words, built, weights))
}

impl Describer {
    /// Reads a folder.
    ///
    /// # Errors
    /// Names the file, and the field or tensor that is wrong.
    pub fn open(folder: impl AsRef<Path>) -> Result<Describer> {
        let folder = folder.as_ref();
        let (whole, config, weights, built) = found(folder)?;
        let (network, mut parameters, layout) = built?;
        let foreign = FormulaReader::of(folder);
        let tokenizer = match foreign {
            Some(foreign) => foreign.tokenizer(folder)?,
            None => Tokenizer::open(folder.join(TOKENIZER))?,
        };
        if tokenizer.len() > whole.vocab_size || SpecialTokens::of(&tokenizer) != whole.specials() {
            let what = format!("the tokenizer has {} tokens, the model {}", tokenizer.len(), whole.vocab_size);
            return Err(Error::format(folder.join(CONFIG), "field `vocab_size`", what));
        }
        let path = folder.join(GENERATION_CONFIG);
        let search = read_json_if_present(&path)?.unwrap_or_default();
        Search::check(&search).map_err(|e| e.in_file(&path))?;
        layout.fill(&mut parameters, &weights)?;
        if let Some(foreign) = foreign {
            foreign.finish(&mut parameters, &config);
        }
        let eyes = Eyes::of(&config.image, Some(folder))?;
        Ok(Describer { config, parameters, tokenizer, search, eyes, network })
    }

    /// A new model with parameters drawn from the seed.
    ///
    /// # Errors
    /// If sizes do not fit together.
    pub fn new(config: &DescribeConfig, tokenizer: Tokenizer, search: Search, seed: u64) -> Result<Describer> {
        let whole = Describer::whole(config, tokenizer.len(), &tokenizer);
        let mut parameters = Parameters::new();
        let network = DescribeNetwork::new(&mut Builder::new(&mut parameters, seed), &whole)?;
        let eyes = Eyes::of(&config.image, None)?;
        Ok(Describer { config: config.clone(), parameters, tokenizer, search, eyes, network })
    }

    fn whole(config: &DescribeConfig, vocab_size: usize, tokenizer: &Tokenizer) -> ModelConfig {
        ModelConfig::new(Architecture::Describe(config.clone()), vocab_size, SpecialTokens::of(tokenizer))
    }

    /// A model initialized with the weights of a trained one, with the same tokenizer.
    pub(crate) fn from_start(
        config: &DescribeConfig,
        tokenizer: Tokenizer,
        start: &Start,
        search: Search,
        seed: u64,
    ) -> Result<(Describer, Provenance)> {
        let mut describer = Describer::new(config, tokenizer, search, seed)?;
        let layout = Layout::own(&describer.parameters);
        let found = layout.fill_from(&mut describer.parameters, &start.weights, |_| false, seed)?;
        Ok((describer, found))
    }

    /// Writes its folder.
    ///
    /// # Errors
    /// If the folder cannot be written.
    pub fn save(&self, folder: impl AsRef<Path>, storage: Storage) -> Result<()> {
        let (folder, config) = (folder.as_ref(), self.network.decoder.config());
        own_folder::write(folder, config, &self.parameters, Some(&self.tokenizer), storage)?;
        Ok(write_json(&folder.join(GENERATION_CONFIG), &self.search)?)
    }

    /// The tokens of a text, at most as many as the model can generate.
    pub(crate) fn tokens(&self, text: &str) -> Vec<u32> {
        let mut tokens = self.tokenizer.encode(text);
        tokens.truncate(self.config.max_positions.saturating_sub(1));
        tokens
    }

    /// A batch of texts whose sources are their encoded images, `memory [B, P, C]`.
    fn batch(&self, texts: &[&[u32]], memory: &Var<f32>) -> Batch {
        let mut batch = Batch::new(texts.iter().map(|&text| (&[][..], text)), self.network.decoder.config().specials());
        let places = memory.shape()[1];
        batch.source.lengths.fill(places);
        batch.source.length = places;
        batch
    }

    /// Encodes [prepared](crate::ImageEncoderConfig::prepared) images, `[B, P, C]`.
    fn look(&self, tape: &mut Tape<'_, f32>, images: &[Image]) -> Result<Var<f32>> {
        let input = eyes::input(&self.config.image, self.eyes.as_ref(), images, tape.machine())?;
        self.network.image.forward(tape, input)
    }

    /// The loss of prepared images with their texts; the gradient of each token is multiplied by `scale`.
    pub(crate) fn loss(
        &self,
        tape: &mut Tape<'_, f32>,
        (images, texts): (&[Image], &[&[u32]]),
        smoothing: f64,
        scale: f64,
    ) -> Result<PendingLoss> {
        let memory = self.look(tape, images)?;
        self.network.decoder.loss_over(tape, &memory, &self.batch(texts, &memory), smoothing, scale)
    }

    /// Describes images: for each, up to `beam` descriptions, best first.
    ///
    /// ```
    /// use qkv_models::image::Image;
    /// use qkv_models::text::tokenizer::{Kind, Tokenizer};
    /// use qkv_models::{DescribeConfig, Describer, ImageEncoderConfig, Search};
    /// let tokenizer = Tokenizer::train(["a red circle"; 2], Kind::Words { size: 50 })?;
    /// let image = ImageEncoderConfig { height: 8, width: 16, patch_size: 8, layers: 1, ..Default::default() };
    /// let config = DescribeConfig { image, d_model: 16, ffn_dim: 16, max_positions: 5, ..Default::default() };
    /// let describer = Describer::new(&config, tokenizer, Search::greedy(), 1)?;
    /// let machine = qkv_nn::Machine::new(1);
    /// let picture = Image::new(16, 8, 3, vec![90; 16 * 8 * 3])?;
    /// let found = describer.describe(&[picture.clone()], &describer.search, &machine)?;
    /// let looked = describer.look_at(&picture, &found[0][0].tokens, &machine)?;
    /// assert_eq!((looked.grid, looked.weights[0].len()), ([1, 2], 2));
    /// # Ok::<(), qkv_models::Error>(())
    /// ```
    ///
    /// # Errors
    /// If the model computes NaN.
    pub fn describe(&self, images: &[Image], search: &Search, machine: &Machine) -> Result<Vec<Vec<Description>>> {
        let images = images.iter().map(|image| self.config.image.prepared(image)).collect::<Result<Vec<_>>>()?;
        // Special tokens other than the end are forbidden: an unknown word says nothing about an image, and a text that
        // stops before it says too little.
        let (tokenizer, end) = (&self.tokenizer, self.tokenizer.eos());
        let specials = [Some(tokenizer.pad()), Some(tokenizer.bos()), tokenizer.unk()].into_iter().flatten();
        let never = specials.filter(|&token| token != end).collect();
        // The length of a text does not depend on the size of its image.
        let search = &Search { length_ratio: 0.0, length_extra: self.config.max_positions, never, ..search.clone() };
        let (pool, mut all) = (Pool::new(), vec![Vec::new(); images.len()]);
        // Images of one size are batched; the description of an image does not depend on the others.
        let size = |&at: &usize| (images[at].height(), images[at].width());
        let mut order: Vec<usize> = (0..images.len()).collect();
        order.sort_by_key(size);
        let groups = order.chunk_by(|a, b| size(a) == size(b)).flat_map(|group| group.chunks(TOGETHER));
        for group in groups {
            let together: Vec<Image> = group.iter().map(|&at| images[at].clone()).collect();
            let found = rayon::scope(|_| {
                let mut tape = Tape::inference(&self.parameters, &pool, machine);
                let memory = self.look(&mut tape, &together)?;
                search.run_over(&self.network.decoder, &self.parameters, &mut tape, memory)
            })?;
            for (&at, found) in group.iter().zip(found) {
                let described = found.into_iter().map(|found| Description {
                    text: self.tokenizer.decode(&found.tokens),
                    tokens: found.tokens,
                    score: found.score,
                    log_probability: found.log_probability,
                });
                all[at] = described.collect();
            }
        }
        Ok(all)
    }

    /// Where the model looks as it generates these tokens for an image.
    ///
    /// # Errors
    /// If there are more tokens than the model can generate.
    pub fn look_at(&self, image: &Image, tokens: &[u32], machine: &Machine) -> Result<LookedAt> {
        if tokens.len() + 1 > self.config.max_positions {
            let (found, most) = (tokens.len(), self.config.max_positions - 1);
            return Err(Error::invalid(format!("the text has {found} tokens, the model writes at most {most}")));
        }
        let image = self.config.image.prepared(image)?;
        let pool = Pool::new();
        let mut tape = Tape::inference(&self.parameters, &pool, machine);
        tape.capture();
        let memory = self.look(&mut tape, std::slice::from_ref(&image))?;
        let (batch, decoder) = (self.batch(&[tokens], &memory), &self.network.decoder);
        decoder.hidden_over(&mut tape, &memory, &batch.source, &batch.decoder_input)?;
        let captured = tape.captured();
        let of_image = (0..self.network.image.layers()).map(|layer| crate::model::AttentionSite {
            group: Group::Encoder,
            layer,
            label: format!("image.layers.{layer}.self_attn"),
        });
        let sites: Vec<_> = of_image.chain(decoder.sites()).collect();
        let attentions = sites.iter().map(|site| observed(site, &site.calls(&captured), &self.parameters));
        let attentions = attentions.collect::<Result<Vec<_>>>()?;
        let site = decoder.alignment_site().ok_or_else(|| Error::invalid("the model has no attention to images"))?;
        let same = |seen: &&ObservedAttention| (seen.group, seen.layer) == (site.group, site.layer);
        let aligned = attentions.iter().find(same).expect("every site was observed");
        let mut weights = aligned.mean_over_heads()?;
        if self.config.image.class_token {
            weights.iter_mut().for_each(|row| *row = row.split_off(1));
        }
        let tokens = [tokens, &[decoder.config().eos_token_id]].concat();
        let grid = self.config.image.grid_of(&image);
        Ok(LookedAt { image, grid, tokens, weights, attentions })
    }
}
