//! What a run needs to go on as if it had never stopped: `checkpoints/STEP/`, written whole or not at all, and `metrics.jsonl`,
//! cut back to where the checkpoint was.

use crate::checkpoint::{parameter_bytes, read_parameters};
use crate::files::atomic;
use crate::files::tensors::{NamedTensor, Storage, TensorFile, to_bytes};
use crate::{Error, Result};
use qkv_nn::{Moments, Parameters};
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// Where a run stands.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Progress {
    /// Steps taken.
    pub step: u64,
    /// The pass over the data that the next batch belongs to.
    pub epoch: u64,
    /// The next batch of that pass.
    pub batch: u64,
    /// The best score so far.
    pub best: Option<f64>,
    /// The step it was reached at.
    pub best_step: u64,
    /// Validations since then.
    pub stale: u64,
    /// The length of `metrics.jsonl`.
    pub metrics_bytes: u64,
}

const FOLDER: &str = "checkpoints";
const PROGRESS: &str = "state.json";
const WEIGHTS: &str = "weights.safetensors";
const AVERAGE: &str = "average.safetensors";
const MOMENTS: &str = "moments.safetensors";

/// A checkpoint.
pub(super) struct SavedCheckpoint {
    folder: PathBuf,
}

/// Checkpoints of a run, oldest first.
fn all(run: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let folder = run.join(FOLDER);
    let Ok(entries) = std::fs::read_dir(&folder) else { return Ok(Vec::new()) };
    let mut found: Vec<(u64, PathBuf)> = entries
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            let step = path.file_name()?.to_str()?.parse().ok()?;
            path.join(PROGRESS).is_file().then_some((step, path))
        })
        .collect();
    found.sort();
    Ok(found)
}

impl SavedCheckpoint {
    /// The last one of a run.
    pub fn latest(run: &Path) -> Result<Option<SavedCheckpoint>> {
        Ok(all(run)?.pop().map(|(_, folder)| SavedCheckpoint { folder }))
    }

    /// Writes one, and removes all but the last `keep`.
    pub fn write(
        run: &Path,
        progress: &Progress,
        weights: &Parameters<f32>,
        average: Option<&Parameters<f32>>,
        moments: &Moments<f32>,
        keep: usize,
    ) -> Result<()> {
        let folder = run.join(FOLDER);
        std::fs::create_dir_all(&folder).map_err(|e| Error::file("write", &folder, e))?;
        atomic::write_folder(folder.join(format!("{:08}", progress.step)), |folder| {
            atomic::write(folder.join(WEIGHTS), &parameter_bytes(weights, Storage::F32)?)?;
            if let Some(average) = average {
                atomic::write(folder.join(AVERAGE), &parameter_bytes(average, Storage::F32)?)?;
            }
            atomic::write(folder.join(MOMENTS), &moment_bytes(weights, moments)?)?;
            let json = serde_json::to_string_pretty(progress).expect("plain values") + "\n";
            atomic::write(folder.join(PROGRESS), json.as_bytes())
        })?;
        let mut found = all(run)?;
        found.truncate(found.len().saturating_sub(keep));
        for (_, old) in found {
            std::fs::remove_dir_all(&old).map_err(|e| Error::file("remove", &old, e))?;
        }
        Ok(())
    }

    /// Reads it back.
    pub fn read(
        &self,
        weights: &mut Parameters<f32>,
        average: Option<&mut Parameters<f32>>,
        moments: &mut Moments<f32>,
    ) -> Result<Progress> {
        let path = self.folder.join(PROGRESS);
        let text = std::fs::read(&path).map_err(|e| Error::file("read", &path, e))?;
        let progress: Progress =
            serde_json::from_slice(&text).map_err(|e| Error::line(&path, e.line().max(1), e.to_string()))?;
        let read = |name: &str, into: &mut Parameters<f32>| {
            let path = self.folder.join(name);
            read_parameters(into, &TensorFile::open(&path)?)
        };
        read(WEIGHTS, weights)?;
        if let Some(average) = average {
            read(AVERAGE, average)?;
        }
        let file = TensorFile::open(self.folder.join(MOMENTS))?;
        for (at, param) in weights.all().enumerate() {
            let (name, shape) = (weights.name(param), weights.shape(param));
            moments.first[at] = file.read_shaped(&format!("{name}{FIRST}"), shape)?;
            moments.second[at] = file.read_shaped(&format!("{name}{SECOND}"), shape)?;
        }
        moments.steps = progress.step;
        Ok(progress)
    }
}

const FIRST: &str = ".first";
const SECOND: &str = ".second";

fn moment_bytes(weights: &Parameters<f32>, moments: &Moments<f32>) -> Result<Vec<u8>> {
    let names: Vec<[String; 2]> =
        weights.all().map(|param| [FIRST, SECOND].map(|suffix| format!("{}{suffix}", weights.name(param)))).collect();
    let named: Vec<NamedTensor<'_>> = weights
        .all()
        .zip(&names)
        .enumerate()
        .flat_map(|(at, (param, [first, second]))| {
            let shape = weights.shape(param);
            [
                NamedTensor { name: first, shape, values: &moments.first[at] },
                NamedTensor { name: second, shape, values: &moments.second[at] },
            ]
        })
        .collect();
    to_bytes(&named, Storage::F32)
}

/// The file of measurements: one JSON object a line.
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

    /// How long it is.
    pub fn bytes(&mut self) -> u64 {
        self.file.stream_position().unwrap_or(0)
    }

    /// Back to this length.
    pub fn cut(&mut self, bytes: u64) -> Result<()> {
        let cut = self.file.set_len(bytes).and_then(|()| self.file.seek(SeekFrom::Start(bytes)));
        cut.map(drop).map_err(|e| Error::file("write", &self.path, e))
    }
}
