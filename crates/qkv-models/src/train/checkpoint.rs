//! Checkpoints of training: everything a run needs to resume as if it had never stopped. `checkpoints/STEP/` is written
//! atomically, with the SHA-256 of every file, including the run's tokenizer, in `SHA256SUMS`; on resuming,
//! `metrics.jsonl` is truncated to its length at the checkpoint. The files of finished models are in
//! [`checkpoint`](crate::checkpoint).

pub(super) mod parts;

use super::LossAverages;
use crate::checkpoint::{read_parameters, trained_tensors};
use crate::files::folder::{TOKENIZER, parse_json};
use crate::files::tensors::{NamedTensor, NewFile, Storage, TensorFile};
use crate::files::{atomic, input};
use crate::{Error, Result};
use qkv_formats::Error as FileError;
use qkv_nn::{Moments, Parameters};
use qkv_simd::blocks::BlockType;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// How far a run has come.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Progress {
    /// Steps taken.
    pub step: u64,
    /// The epoch of the next batch.
    pub epoch: u64,
    /// The next batch of that epoch.
    pub batch: u64,
    /// The best validation score so far.
    pub best: Option<f64>,
    /// The step of the best score.
    pub best_step: u64,
    /// Validations since the best score.
    pub stale: u64,
    /// The length of `metrics.jsonl`.
    pub metrics_bytes: u64,
    /// Sums since the last line of `metrics.jsonl`, so that the next line's averages include the steps before an
    /// interruption.
    #[serde(default)]
    pub averages: LossAverages,
    /// The baseline of REINFORCE: a moving average over steps of the mean log-likelihood per target.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub baseline: Option<f64>,
    /// The digest of the frozen parameters, which are not in the checkpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub frozen: Option<String>,
    /// Number of parts that the checkpoint was written in; 0 if it is whole.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub parts: usize,
    /// Whether the checkpoint has checksums; older ones have none.
    #[serde(default)]
    pub checksums: bool,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "as serde calls it")]
fn is_zero(parts: &usize) -> bool {
    *parts == 0
}

const CHECKPOINTS: &str = "checkpoints";
const STATE: &str = "state.json";
const WEIGHTS: &str = "weights.safetensors";
const AVERAGE: &str = "average.safetensors";
const MOMENTS: &str = "moments.safetensors";
const CHECKSUMS: &str = "SHA256SUMS";
/// More parts than anyone has ranks.
const MOST_PARTS: usize = 1 << 16;

/// The state that training changes, besides its progress.
pub(super) struct TrainState<'a> {
    pub weights: &'a mut Parameters<f32>,
    pub average: Option<&'a mut Parameters<f32>>,
    pub moments: &'a mut Moments<f32>,
    /// The digest of the frozen parameters.
    pub frozen: Option<&'a str>,
}

/// The SHA-256 of all frozen parameters; `None` if all are trained. A resumed run must find the same.
pub(super) fn frozen_digest(parameters: &Parameters<f32>) -> Option<String> {
    let mut digest = Sha256::new();
    let mut frozen = parameters.all().filter(|&param| !parameters.is_trained(param)).peekable();
    frozen.peek()?;
    for param in frozen {
        digest.update(parameters.name(param).as_bytes());
        for values in parameters.values(param).chunks(1 << 14) {
            digest.update(BlockType::F32.narrow(values).expect("a plain type"));
        }
    }
    Some(hexadecimal(digest))
}

/// A checkpoint in a run's folder.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SavedCheckpoint {
    step: u64,
    folder: PathBuf,
}

/// The checkpoints of a run, oldest first. A folder without a state was being deleted.
fn all(run: &Path) -> Vec<SavedCheckpoint> {
    let Ok(entries) = std::fs::read_dir(run.join(CHECKPOINTS)) else { return Vec::new() };
    let mut found: Vec<SavedCheckpoint> = entries
        .filter_map(|entry| {
            let folder = entry.ok()?.path();
            let step = folder.file_name()?.to_str()?.parse().ok()?;
            folder.join(STATE).is_file().then_some(SavedCheckpoint { step, folder })
        })
        .collect();
    found.sort();
    found
}

/// Removes the files and folders in a run's folder that killed processes were writing or deleting.
///
/// # Errors
/// I/O errors.
pub(super) fn remove_litter(run: &Path) -> Result<()> {
    let checkpoints = run.join(CHECKPOINTS);
    atomic::remove_litter(run)?;
    atomic::remove_litter(&checkpoints)?;
    let Ok(entries) = std::fs::read_dir(&checkpoints) else { return Ok(()) };
    for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
        let is_step = path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.parse::<u64>().is_ok());
        if is_step && path.is_dir() && !path.join(STATE).exists() {
            atomic::remove_folder(&path)?;
        }
    }
    Ok(())
}

impl SavedCheckpoint {
    /// The checkpoint to resume from: the one of a step, or the newest.
    ///
    /// # Errors
    /// If there is no checkpoint of that step.
    pub fn find(run: &Path, step: Option<u64>) -> Result<Option<SavedCheckpoint>> {
        let mut found = all(run);
        let Some(step) = step else { return Ok(found.pop()) };
        let steps: Vec<String> = found.iter().map(|saved| saved.step.to_string()).collect();
        match found.into_iter().find(|saved| saved.step == step) {
            Some(saved) => Ok(Some(saved)),
            None => {
                let hint = match steps.is_empty() {
                    true => "it has no checkpoints".to_owned(),
                    false => format!("it has checkpoints of steps {}", steps.join(", ")),
                };
                Err(Error::invalid(format!("`{}` has no checkpoint of step {step}", run.display())).with_hint(hint))
            }
        }
    }

    /// Writes a checkpoint and removes all but the newest `keep`.
    pub fn write(run: &Path, progress: &Progress, state: TrainState<'_>, keep: usize) -> Result<()> {
        let progress = Progress { frozen: state.frozen.map(str::to_owned), ..progress.clone() };
        SavedCheckpoint::write_with(run, &progress, keep, |folder| {
            let mut sums = write_tensors(folder, WEIGHTS, &trained_tensors(state.weights))?;
            if let Some(average) = &state.average {
                sums += &write_tensors(folder, AVERAGE, &trained_tensors(average))?;
            }
            Ok(sums + &write_moments(folder, state.weights, state.moments)?)
        })
    }

    /// Writes a checkpoint whose tensors `fill` writes into a folder, returning their lines of `SHA256SUMS`.
    pub fn write_with(
        run: &Path,
        progress: &Progress,
        keep: usize,
        fill: impl FnOnce(&Path) -> Result<String>,
    ) -> Result<()> {
        let parent = run.join(CHECKPOINTS);
        std::fs::create_dir_all(&parent).map_err(|e| Error::file("write", &parent, e))?;
        let progress = Progress { checksums: true, ..progress.clone() };
        let json = serde_json::to_string_pretty(&progress).expect("plain values") + "\n";
        atomic::write_folder(parent.join(format!("{:08}", progress.step)), |folder| {
            let mut sums = fill(folder)?;
            sums += &write_summed(folder, STATE, json.as_bytes())?;
            if let Ok(tokenizer) = input::read(&run.join(TOKENIZER), input::TOKENIZER_MAX) {
                sums += &format!("{}  {TOKENIZER_FROM_CHECKPOINT}\n", sha256(&tokenizer));
            }
            Ok::<_, Error>(atomic::write(folder.join(CHECKSUMS), sums.as_bytes())?)
        })?;
        let mut found = all(run);
        found.truncate(found.len().saturating_sub(keep));
        Ok(found.iter().try_for_each(|old| atomic::remove_folder(&old.folder))?)
    }

    /// Reads the checkpoint.
    ///
    /// # Errors
    /// If a file is damaged: names it and the newest intact checkpoint.
    pub fn read(&self, run: &Path, state: TrainState<'_>) -> Result<Progress> {
        let files = self.verified(run).map_err(|error| self.with_whole_checkpoint(run, error))?;
        let open = |name: &str| {
            let path = self.folder.join(name);
            let bytes = files.bytes.get(name).cloned().unwrap_or_default();
            Ok(TensorFile::from_bytes(bytes, path)?)
        };
        let trained = |suffixes: &[&str]| tensors(state.weights, suffixes);
        let file = |name: &str, suffixes: &[&str]| match files.progress.parts {
            0 => open(name),
            parts => {
                let opened =
                    (0..parts).map(|part| open(&parts::name(name, part, parts))).collect::<Result<Vec<_>>>()?;
                Ok(TensorFile::from_bytes(parts::assemble(&trained(suffixes), &opened)?, self.folder.join(name))?)
            }
        };
        if files.progress.frozen.as_deref() != state.frozen {
            return Err(Error::invalid("the frozen parameters are not those that the run was started with")
                .with_hint("`model.from` and what is frozen have to stay as they were"));
        }
        let (weights, moments) = (file(WEIGHTS, &[""])?, file(MOMENTS, &[FIRST, SECOND])?);
        if let Some(average) = state.average {
            read_parameters(average, &file(AVERAGE, &[""])?)?;
        }
        read_parameters(state.weights, &weights)?;
        for (at, param) in state.weights.all().enumerate().filter(|&(_, param)| state.weights.is_trained(param)) {
            let (name, shape) = (state.weights.name(param), state.weights.shape(param));
            state.moments.first[at] = moments.read_shaped(&format!("{name}{FIRST}"), shape)?.into();
            state.moments.second[at] = moments.read_shaped(&format!("{name}{SECOND}"), shape)?.into();
        }
        state.moments.steps = files.progress.step;
        // The next checkpoint may have another number of parts.
        Ok(Progress { parts: 0, ..files.progress })
    }

    /// Removes the checkpoints after this one, so that a run that goes back does not find them again.
    pub fn remove_newer(&self, run: &Path) -> Result<()> {
        let newer = all(run).into_iter().filter(|other| other.step > self.step);
        Ok(newer.into_iter().try_for_each(|other| atomic::remove_folder(&other.folder))?)
    }

    /// Reads every file and compares its checksum.
    fn verified(&self, run: &Path) -> Result<CheckpointFiles> {
        let mut bytes = BTreeMap::new();
        let mut read = |name: &str| -> Result<()> {
            let path = self.folder.join(name);
            if path.exists() {
                bytes.insert(name.to_owned(), input::read(&path, u64::MAX)?);
            }
            Ok(())
        };
        read(STATE)?;
        read(CHECKSUMS)?;
        let damaged = |name: &str, what: String| Error::damaged(self.folder.join(name), what);
        let state = self.folder.join(STATE);
        let progress: Progress = parse_json(bytes.get(STATE).map_or(&[][..], |bytes| bytes), &state)
            .map_err(|error| damaged(STATE, error.to_string()))?;
        if progress.step != self.step {
            let what = format!("it is of step {}, its folder of step {}", progress.step, self.step);
            return Err(damaged(STATE, what));
        }
        if progress.parts > MOST_PARTS {
            return Err(damaged(STATE, format!("{} parts are more than {MOST_PARTS}", progress.parts)));
        }
        let mut read = |name: &str| -> Result<()> {
            let path = self.folder.join(name);
            if path.exists() {
                bytes.insert(name.to_owned(), input::read(&path, u64::MAX)?);
            }
            Ok(())
        };
        for name in [WEIGHTS, AVERAGE, MOMENTS] {
            match progress.parts {
                0 => read(name)?,
                parts => (0..parts).try_for_each(|part| read(&parts::name(name, part, parts)))?,
            }
        }
        if progress.checksums || bytes.contains_key(CHECKSUMS) {
            let sums = bytes.get(CHECKSUMS).ok_or_else(|| damaged(CHECKSUMS, "it is missing".into()))?;
            for line in String::from_utf8_lossy(sums).lines() {
                let Some((expected, name)) = line.split_once("  ") else {
                    return Err(damaged(CHECKSUMS, format!("`{line}` is not a checksum and a file")));
                };
                let found = match name {
                    TOKENIZER_FROM_CHECKPOINT => {
                        Some(sha256(&input::read(&run.join(TOKENIZER), input::TOKENIZER_MAX)?))
                    }
                    name => bytes.get(name).map(|bytes| sha256(bytes)),
                };
                let what = match found {
                    Some(found) if found == expected => continue,
                    Some(_) => "its SHA-256 is not the one it was written with",
                    None => "it is missing",
                };
                let path = if name == TOKENIZER_FROM_CHECKPOINT { run.join(TOKENIZER) } else { self.folder.join(name) };
                return Err(Error::damaged(path, what));
            }
        }
        Ok(CheckpointFiles { progress, bytes })
    }

    /// Adds the newest other intact checkpoint to an error about damage.
    fn with_whole_checkpoint(&self, run: &Path, error: Error) -> Error {
        let others = all(run).into_iter().rev().filter(|other| other != self);
        let whole = || others.into_iter().find(|other| other.verified(run).is_ok()).map(|other| other.step);
        let Error::Formats(error) = error else { return error };
        match error {
            FileError::Damaged { path, what, .. } => FileError::Damaged { path, what, whole: whole() },
            FileError::File { path, source, .. } => {
                FileError::Damaged { path, what: source.to_string(), whole: whole() }
            }
            error => error,
        }
        .into()
    }
}

/// The files of a checkpoint, with checksums verified.
struct CheckpointFiles {
    progress: Progress,
    bytes: BTreeMap<String, Vec<u8>>,
}

/// The run's tokenizer as `SHA256SUMS` names it, so that `sha256sum -c` finds it.
const TOKENIZER_FROM_CHECKPOINT: &str = "../../tokenizer.json";

/// Writes a file, and returns its line of `SHA256SUMS`.
fn write_summed(folder: &Path, name: &str, bytes: &[u8]) -> Result<String> {
    atomic::write(folder.join(name), bytes)?;
    Ok(format!("{}  {name}\n", sha256(bytes)))
}

/// Writes a file of tensors, and returns its line of `SHA256SUMS`.
fn write_tensors(folder: &Path, name: &str, tensors: &[NamedTensor<'_>]) -> Result<String> {
    let file = NewFile::of(tensors, Storage::F32)?;
    let mut digest = Sha256::new();
    atomic::write_with(folder.join(name), |to| {
        file.write(&mut Summed { to: BufWriter::new(to), digest: &mut digest })
    })?;
    Ok(format!("{}  {name}\n", hexadecimal(digest)))
}

/// A writer that adds everything it writes to a digest.
struct Summed<'a, W> {
    to: W,
    digest: &'a mut Sha256,
}

impl<W: Write> Write for Summed<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let written = self.to.write(bytes)?;
        self.digest.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.to.flush()
    }
}

/// Names and shapes of the tensors of trained parameters in a file, with each of these suffixes.
fn tensors<'a>(weights: &'a Parameters<f32>, suffixes: &[&str]) -> Vec<(String, &'a [usize])> {
    let named = |param| suffixes.iter().map(move |suffix| format!("{}{suffix}", weights.name(param)));
    weights.trained().flat_map(|param| named(param).map(move |name| (name, weights.shape(param)))).collect()
}

fn sha256(bytes: &[u8]) -> String {
    hexadecimal(Sha256::new_with_prefix(bytes))
}

fn hexadecimal(digest: Sha256) -> String {
    digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

const FIRST: &str = ".first";
const SECOND: &str = ".second";

/// Writes the moments of Adam, and returns their line of `SHA256SUMS`.
fn write_moments(folder: &Path, weights: &Parameters<f32>, moments: &Moments<f32>) -> Result<String> {
    let names: Vec<[String; 2]> =
        weights.all().map(|param| [FIRST, SECOND].map(|suffix| format!("{}{suffix}", weights.name(param)))).collect();
    let named: Vec<NamedTensor<'_>> = weights
        .all()
        .zip(&names)
        .enumerate()
        .filter(|&(_, (param, _))| weights.is_trained(param))
        .flat_map(|(at, (param, [first, second]))| {
            let shape = weights.shape(param);
            [
                NamedTensor { name: first, shape, values: &moments.first[at] },
                NamedTensor { name: second, shape, values: &moments.second[at] },
            ]
        })
        .collect();
    write_tensors(folder, MOMENTS, &named)
}

/// The measurements of a run: `metrics.jsonl`, a JSON object per line.
pub(super) struct Metrics {
    path: PathBuf,
    file: File,
}

impl Metrics {
    pub fn open(run: &Path) -> Result<Metrics> {
        let path = run.join("metrics.jsonl");
        let file = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
        let mut file = file.map_err(|e| Error::file("open", &path, e))?;
        file.seek(SeekFrom::End(0)).map_err(|e| Error::file("read", &path, e))?;
        Ok(Metrics { path, file })
    }

    pub fn write(&mut self, line: &impl Serialize) -> Result<()> {
        let mut text = serde_json::to_vec(line).expect("plain values");
        text.push(b'\n');
        self.file.write_all(&text).map_err(|e| Error::file("write", &self.path, e))
    }

    /// The length of the file.
    pub fn bytes(&mut self) -> u64 {
        self.file.stream_position().unwrap_or(0)
    }

    /// Truncates the file to this length. If it is shorter, because someone deleted it, it is continued at its end.
    pub fn cut(&mut self, bytes: u64) -> Result<()> {
        let cut = self.file.metadata().and_then(|about| {
            if about.len() > bytes {
                self.file.set_len(bytes)?;
            }
            self.file.seek(SeekFrom::End(0))
        });
        cut.map(drop).map_err(|e| Error::file("write", &self.path, e))
    }
}
