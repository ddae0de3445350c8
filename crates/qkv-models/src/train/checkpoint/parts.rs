//! Sharded checkpoints: each rank writes the pieces of parameters that it owns, as one-dimensional tensors `NAME@START`
//! in files such as `weights-00001-of-00004.safetensors`. The folder gets its name when all parts are written.

use super::{AVERAGE, FIRST, MOMENTS, Progress, SECOND, SavedCheckpoint, WEIGHTS, write_tensors};
use crate::files::tensors::{NamedTensor, Storage, TensorFile, to_bytes};
use crate::{Error, Result};
use qkv_ranks::Ranks;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// A piece of a parameter with its part of the state.
pub(in super::super) struct Piece<'a> {
    pub name: &'a str,
    pub range: Range<usize>,
    pub weights: &'a [f32],
    pub average: Option<&'a [f32]>,
    pub first: &'a [f32],
    pub second: &'a [f32],
}

/// The name of a part of a file.
pub(super) fn name(whole: &str, part: usize, parts: usize) -> String {
    let stem = whole.strip_suffix(".safetensors").unwrap_or(whole);
    format!("{stem}-{:05}-of-{parts:05}.safetensors", part + 1)
}

/// Writes a checkpoint together with all ranks: each writes its own pieces, with their average if there is one, and the
/// first rank everything else. The newest `keep` checkpoints stay.
pub(in super::super) fn write(
    ranks: &Ranks,
    run: &Path,
    progress: &Progress,
    (keep, averaged): (usize, bool),
    pieces: &[Piece<'_>],
) -> Result<()> {
    let write_part = |folder: &Path| -> Result<String> {
        let lines = own_files(pieces, averaged).into_iter().map(|(whole, pieces)| {
            let shapes: Vec<[usize; 1]> = pieces.iter().map(|(_, values)| [values.len()]).collect();
            let named = pieces.iter().zip(&shapes).map(|((name, values), shape)| NamedTensor { name, shape, values });
            let part = name(whole, ranks.rank(), ranks.size());
            let written = write_tensors(folder, &part, &named.collect::<Vec<_>>());
            written.map_err(|error| error.with_hint("checkpoints in parts need a folder that all ranks share"))
        });
        let lines: String = lines.collect::<Result<_>>()?;
        // When all lines have arrived, all parts are written.
        let all = ranks.all_gather(lines.as_bytes())?;
        Ok(all.iter().map(|lines| String::from_utf8_lossy(lines)).collect())
    };
    if !ranks.is_first() {
        let folder = String::from_utf8_lossy(&ranks.broadcast(0, Vec::new())?).into_owned();
        return write_part(&PathBuf::from(folder)).map(drop);
    }
    let progress = Progress { parts: ranks.size(), ..progress.clone() };
    SavedCheckpoint::write_with(run, &progress, keep, |folder| {
        ranks.broadcast(0, folder.to_string_lossy().into_owned().into_bytes())?;
        write_part(folder)
    })
}

/// Pieces of parameters, averages or moments, with their names in a file.
type NamedPieces<'a> = Vec<(String, &'a [f32])>;

/// The contents of this rank's files.
fn own_files<'a>(pieces: &[Piece<'a>], averaged: bool) -> Vec<(&'static str, NamedPieces<'a>)> {
    let named = |piece: &Piece<'_>, suffix: &str| format!("{}{suffix}@{}", piece.name, piece.range.start);
    let weights = pieces.iter().map(|piece| (named(piece, ""), piece.weights)).collect();
    let averages = || pieces.iter().map(|piece| (named(piece, ""), piece.average.unwrap_or_default())).collect();
    let both = |piece: &Piece<'a>| [(named(piece, FIRST), piece.first), (named(piece, SECOND), piece.second)];
    let mut files = vec![(WEIGHTS, weights)];
    if averaged {
        files.push((AVERAGE, averages()));
    }
    files.push((MOMENTS, pieces.iter().flat_map(both).collect()));
    files
}

/// The bytes of the whole file, assembled from its parts.
///
/// # Errors
/// If pieces of a tensor are missing, overlap or exceed it.
pub(super) fn assemble(tensors: &[(String, &[usize])], parts: &[TensorFile]) -> Result<Vec<u8>> {
    let mut pieces: BTreeMap<&str, Vec<(usize, &TensorFile, &str)>> = BTreeMap::new();
    for file in parts {
        for name in file.names() {
            let place = name.rsplit_once('@').and_then(|(of, start)| Some((of, start.parse::<usize>().ok()?)));
            let Some((of, start)) = place else {
                return Err(Error::damaged(file.path(), format!("tensor `{name}` is no piece of another")));
            };
            pieces.entry(of).or_default().push((start, file, name));
        }
    }
    let mut whole = Vec::with_capacity(tensors.len());
    for (name, shape) in tensors {
        let len: usize = shape.iter().product();
        let mut values = Vec::new();
        let mut own = pieces.remove(name.as_str()).unwrap_or_default();
        own.sort_by_key(|(start, ..)| *start);
        for (start, file, piece) in &own {
            if *start != values.len() {
                return Err(Error::damaged(
                    file.path(),
                    format!("piece `{piece}` does not continue the one before it"),
                ));
            }
            values.append(&mut file.read(piece)?);
        }
        if values.len() != len {
            let place = parts.first().map_or(Path::new(""), TensorFile::path);
            return Err(Error::damaged(
                place,
                format!("its parts have {} of {len} elements of `{name}`", values.len()),
            ));
        }
        whole.push((name, *shape, values));
    }
    let named: Vec<NamedTensor<'_>> =
        whole.iter().map(|(name, shape, values)| NamedTensor { name, shape, values }).collect();
    Ok(to_bytes(&named, Storage::F32)?)
}
