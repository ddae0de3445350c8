//! The ranks of a run. The first rank opens the run's folder and sends the others what they need; all of them check
//! that they would compute the same: version, data and instruction set.

use super::checkpoint::Progress;
use crate::files::input;
use crate::recipe::Data;
use crate::{Error, Recipe, Result};
use qkv_nn::{Loss, Moments, Parameters};
use qkv_ranks::Ranks;
use qkv_simd::Isa;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};

/// The message from the first rank to the others before they start.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct RunHeader {
    pub folder: PathBuf,
    pub recipe: String,
    pub tokenizer: Option<String>,
    /// Whether the run continues from a checkpoint, whose state follows.
    pub resumed: bool,
}

impl RunHeader {
    /// Broadcasts it from the first rank to the others.
    pub fn share(own: Option<RunHeader>, ranks: &Ranks) -> Result<RunHeader> {
        ranks.agree("versions of qkv", env!("CARGO_PKG_VERSION"))?;
        let bytes = own.map(|header| serde_json::to_vec(&header).expect("plain values")).unwrap_or_default();
        let bytes = ranks.broadcast(0, bytes)?;
        Ok(serde_json::from_slice(&bytes).expect("written by the same version"))
    }
}

/// Checks that all ranks read the same data and start from the same weights, and selects the narrowest of their
/// instruction sets.
pub(super) fn agree(recipe: &Recipe, parameters: &Parameters<f32>, ranks: &Ranks) -> Result<()> {
    if ranks.size() == 1 {
        return Ok(());
    }
    let mut digest = Sha256::new();
    for path in files(&recipe.data) {
        digest.update(input::read(path, u64::MAX)?);
    }
    let text = |digest: Sha256| digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    ranks.agree("training data", &text(digest))?;
    let mut digest = Sha256::new();
    parameters.all().for_each(|param| digest.update(bytemuck::cast_slice(parameters.get(param))));
    ranks.agree("weights to start from", &text(digest))?;
    // The f32 matrix products choose their instruction set themselves.
    ranks.agree("instruction sets of matrix products", products())?;
    let all = ranks.all_gather(Isa::available().last().map_or("portable", |isa| isa.name()).as_bytes())?;
    let forced = ranks.all_gather(std::env::var("QKV_ISA").unwrap_or_default().as_bytes())?;
    let names = all.iter().zip(&forced).map(|(own, forced)| if forced.is_empty() { own } else { forced });
    let widths = names.filter_map(|name| ORDER.iter().position(|known| known.as_bytes() == &name[..]));
    let narrowest = ORDER[widths.min().unwrap_or_default()];
    if Isa::named(narrowest).is_some_and(Isa::decide) {
        return Ok(());
    }
    let what = format!("the narrowest instruction set of all ranks is `{narrowest}`, and this rank uses another");
    Err(Error::invalid(what).with_hint(format!("set `QKV_ISA={narrowest}` for all ranks")))
}

/// Instruction sets, narrowest first.
const ORDER: [&str; 6] = ["portable", "neon", "avx2", "avx512", "avx512bf16", "amx"];

/// The instruction set that the `gemm` crate uses for matrix products.
fn products() -> &'static str {
    #[cfg(target_arch = "x86_64")]
    {
        if std::is_x86_feature_detected!("avx512f") {
            return "avx512";
        }
        if std::is_x86_feature_detected!("fma") {
            return "fma";
        }
    }
    std::env::consts::ARCH
}

/// The files that contain a recipe's data.
fn files(data: &Data) -> Vec<&Path> {
    match data {
        Data::Files { train, dev } => vec![train, dev],
        Data::Text { text, dev } => vec![text, dev],
        Data::Chat { chat, dev, template } => [chat, dev].into_iter().chain(template).map(PathBuf::as_path).collect(),
        Data::Classes { classes, dev } => vec![classes, dev],
        Data::Tags { tags, dev } => vec![tags, dev],
        Data::Answers { answers, dev } => vec![answers, dev],
        Data::Images { images, labels, dev_images, dev_labels, .. } => vec![images, labels, dev_images, dev_labels],
        Data::Boxes { boxes, dev } => vec![boxes, dev],
        Data::Captions { captions, dev } => vec![captions, dev],
        Data::Questions { questions, dev } => vec![questions, dev],
        Data::Spoken { spoken, dev } => vec![spoken, dev],
        Data::Tones { .. } => Vec::new(),
        Data::Needles { .. } | Data::Stories { .. } | Data::Shapes { .. } | Data::Task { .. } => Vec::new(),
    }
}

/// Broadcasts the first rank's weights.
pub(super) fn share_weights(weights: &mut Parameters<f32>, ranks: &Ranks) -> Result<()> {
    // Frozen parameters still have their initial values.
    let trained: Vec<_> = weights.trained().collect();
    trained.into_iter().try_for_each(|param| share(weights.get_mut(param), ranks))
}

/// Broadcasts the first rank's moments.
pub(super) fn share_moments(moments: &mut Moments<f32>, steps: u64, ranks: &Ranks) -> Result<()> {
    moments.steps = steps;
    let mut all = moments.first.iter_mut().chain(&mut moments.second);
    all.try_for_each(|values| share(values, ranks))
}

fn share(values: &mut [f32], ranks: &Ranks) -> Result<()> {
    let own = if ranks.is_first() { bytemuck::cast_slice(values).to_vec() } else { Vec::new() };
    let found = ranks.broadcast(0, own)?;
    if found.len() != size_of_val(values) {
        return Err(Error::invalid("the first rank has a model of another size"));
    }
    values.copy_from_slice(&bytemuck::pod_collect_to_vec::<u8, f32>(&found));
    Ok(())
}

/// Broadcasts the first rank's progress.
pub(super) fn share_progress(progress: &mut Progress, ranks: &Ranks) -> Result<()> {
    let own = serde_json::to_vec(&*progress).expect("plain values");
    let found = ranks.broadcast(0, own)?;
    *progress = serde_json::from_slice(&found).expect("written by the same version");
    Ok(())
}

/// Whether any rank was asked to stop.
pub(super) fn any(own: bool, ranks: &Ranks) -> Result<bool> {
    Ok(ranks.all_gather_sized(&[u8::from(own)], &vec![1; ranks.size()])?.iter().any(|flag| flag[0] != 0))
}

/// Gathers the loss and the penalty of every micro-batch from all ranks and adds them in the ranks' order.
pub(super) fn sum_losses(own: &[(Loss, f64)], ranks: &Ranks) -> Result<(Loss, f64)> {
    let number = |(loss, penalty): &(Loss, f64)| {
        [loss.smoothed, loss.nll, loss.rows as f64, loss.right as f64, *penalty].map(f64::to_le_bytes).concat()
    };
    let all = ranks.all_gather(&own.iter().flat_map(number).collect::<Vec<u8>>())?.concat();
    let (mut loss, mut penalty) = (Loss::default(), 0.0);
    for one in all.chunks_exact(5 * 8) {
        let number = |at: usize| f64::from_le_bytes(one[8 * at..][..8].try_into().expect("eight bytes"));
        loss += Loss { smoothed: number(0), nll: number(1), rows: number(2) as usize, right: number(3) as usize };
        penalty += number(4);
    }
    Ok((loss, penalty))
}
