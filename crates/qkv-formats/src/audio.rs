//! Audio: decodes files to mono samples at 16 kHz and turns samples into log-mel spectrograms, piece by piece, so that
//! hours of audio need no more memory than a minute.
//!
//! | module | owns |
//! | --- | --- |
//! | [`alignment`] | the positions at which tokens were spoken |
//! | `decode` | WAV, FLAC, MP3 and Ogg Vorbis to mono samples |
//! | `resample` | any rate to 16 kHz |
//! | [`log_mel`] | mel filters and the spectrogram that speech models read |
//! | [`vocoder`] | spectrograms for speech synthesis, and sound from spectrograms |
//! | [`wav`] | writing WAV |

pub mod alignment;
mod decode;
pub mod log_mel;
mod resample;
pub mod vocoder;
pub mod wav;

pub use log_mel::{MelFilters, Spectrogram};
pub use vocoder::Vocoder;

use crate::files::input;
use crate::{Error, Result};
use std::fs::File;
use std::io::{Cursor, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use symphonia::core::io::MediaSource;

/// Samples per second of all audio that leaves this module.
pub const SAMPLE_RATE: usize = 16_000;

/// A recording that can be read several times, by one reader at a time.
#[derive(Debug)]
pub struct Recording {
    source: Source,
    name: PathBuf,
}

#[derive(Debug)]
enum Source {
    Path,
    Bytes(Arc<[u8]>),
    /// An unnamed temporary file.
    Temporary(File),
}

impl Recording {
    /// Opens a regular file.
    ///
    /// # Errors
    /// If the file cannot be opened; the error names it.
    pub fn open(path: impl AsRef<Path>) -> Result<Recording> {
        let name = path.as_ref().to_owned();
        input::open(&name)?;
        Ok(Recording { source: Source::Path, name })
    }

    /// From the bytes of a file; `name` is for errors.
    ///
    /// ```
    /// use qkv_formats::audio::{Recording, wav};
    ///
    /// let bytes = wav::to_bytes(&[0.0, 0.5, -0.5, 0.25], 16_000);
    /// let recording = Recording::from_bytes(bytes, "a.wav");
    /// let pieces = recording.samples()?.collect::<Result<Vec<_>, _>>()?;
    /// assert_eq!(pieces.concat(), [0.0, 0.5, -0.5, 0.25]);
    /// # Ok::<(), qkv_formats::Error>(())
    /// ```
    pub fn from_bytes(bytes: impl Into<Arc<[u8]>>, name: impl AsRef<Path>) -> Recording {
        Recording { source: Source::Bytes(bytes.into()), name: name.as_ref().to_owned() }
    }

    /// Reads a stream to its end and keeps it in a temporary file. `name` is for errors.
    ///
    /// # Errors
    /// If the stream cannot be read or the temporary file cannot be written.
    pub fn from_stream(mut stream: impl Read, name: impl AsRef<Path>) -> Result<Recording> {
        let name = name.as_ref().to_owned();
        let failed = |error| Error::file("read", &name, error);
        let mut file = tempfile::tempfile().map_err(failed)?;
        std::io::copy(&mut stream, &mut file).map_err(failed)?;
        file.flush().map_err(failed)?;
        Ok(Recording { source: Source::Temporary(file), name })
    }

    /// Its name, for errors.
    pub fn name(&self) -> &Path {
        &self.name
    }

    /// Its mono samples at 16 kHz, in pieces of any length.
    ///
    /// # Errors
    /// If it is not audio, or in an unsupported format.
    pub fn samples(&self) -> Result<Samples> {
        let failed = |error| Error::file("read", &self.name, error);
        let source: Box<dyn MediaSource> = match &self.source {
            Source::Path => Box::new(input::open(&self.name)?),
            Source::Bytes(bytes) => Box::new(Cursor::new(bytes.clone())),
            Source::Temporary(file) => {
                let mut file = file.try_clone().map_err(failed)?;
                file.rewind().map_err(failed)?;
                Box::new(file)
            }
        };
        let wrong = |what| Error::format(&self.name, "sound", what);
        let decoder = decode::Decoder::new(source).map_err(wrong)?;
        let resampler = match decoder.rate() {
            SAMPLE_RATE => None,
            rate => Some(resample::Resampler::new(rate).map_err(wrong)?),
        };
        Ok(Samples { decoder, resampler, name: self.name.clone(), ended: false })
    }
}

/// The samples of a recording, in pieces. Ends after an error.
#[derive(Debug)]
pub struct Samples {
    decoder: decode::Decoder,
    resampler: Option<resample::Resampler>,
    name: PathBuf,
    ended: bool,
}

impl Iterator for Samples {
    type Item = Result<Vec<f32>>;

    fn next(&mut self) -> Option<Self::Item> {
        while !self.ended {
            let decoded = self.decoder.next();
            self.ended = !matches!(decoded, Ok(Some(_)));
            let piece = match (decoded, &mut self.resampler) {
                (Err(what), _) => return Some(Err(Error::format(&self.name, "sound", what))),
                (Ok(Some(piece)), None) => piece,
                (Ok(Some(piece)), Some(resampler)) => resampler.push(&piece),
                (Ok(None), Some(resampler)) => resampler.finish(),
                (Ok(None), None) => Vec::new(),
            };
            if !piece.is_empty() {
                return Some(Ok(piece));
            }
        }
        None
    }
}
