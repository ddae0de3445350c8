//! WAV, FLAC, MP3 and Ogg Vorbis, packet by packet, mixed down to one channel at the rate of the file.

use std::io::{Read, Seek, SeekFrom};
use std::panic::{AssertUnwindSafe, catch_unwind};
use symphonia::core::codecs::audio::{AudioDecoder, AudioDecoderOptions};
use symphonia::core::errors::Error;
use symphonia::core::formats::probe::Hint;
use symphonia::core::formats::{FormatOptions, FormatReader, TrackType};
use symphonia::core::io::{MediaSource, MediaSourceStream};
use symphonia::core::meta::MetadataOptions;

/// Supported sample rates in hertz.
const RATES: std::ops::RangeInclusive<usize> = 1_000..=768_000;
/// The largest number of channels.
const MOST_CHANNELS: usize = 64;
/// Sizes in the header of a WAV file whose length was not known when it was written to a pipe: the largest value of the
/// field, or about half of it, as `arecord` and `sox` write.
const UNKNOWN_BYTES: [std::ops::RangeInclusive<u64>; 2] = [0x7fff_0000..=0x8000_0100, 0xffff_0000..=u64::MAX];

/// The largest sample that is accepted; valid ones stay within ±1, or near it.
const LOUDEST: f32 = 1e6;

/// Container formats, recognized by their first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Container {
    Wav,
    Flac,
    Ogg,
    Mpeg,
}

impl Container {
    fn of(start: &[u8]) -> Option<Container> {
        match start {
            [b'R', b'I', b'F', b'F', ..] => Some(Container::Wav),
            [b'f', b'L', b'a', b'C', ..] => Some(Container::Flac),
            [b'O', b'g', b'g', b'S', ..] => Some(Container::Ogg),
            [b'I', b'D', b'3', ..] => Some(Container::Mpeg),
            [0xff, second, ..] if second & 0xe0 == 0xe0 => Some(Container::Mpeg),
            _ => None,
        }
    }
}

/// An open file.
pub(super) struct Decoder {
    format: Box<dyn FormatReader>,
    decoder: Box<dyn AudioDecoder>,
    track: u32,
    rate: usize,
    /// Samples per channel according to the header, if it can be trusted.
    announced: Option<u64>,
    /// Samples per channel so far.
    decoded: u64,
    packets: u64,
    damaged: u64,
    container: Container,
}

impl std::fmt::Debug for Decoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Decoder({:?}, {} Hz)", self.container, self.rate)
    }
}

/// Turns a panic of a decoder into an error: some headers make its arithmetic overflow, which panics in debug builds.
fn caught<T>(work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| Err("it cannot be decoded".into()))
}

fn cut_off(error: &Error) -> bool {
    matches!(error, Error::IoError(error) if error.kind() == std::io::ErrorKind::UnexpectedEof)
}

impl Decoder {
    pub fn new(mut source: Box<dyn MediaSource>) -> Result<Decoder, String> {
        let mut start = Vec::new();
        let read = source.by_ref().take(12).read_to_end(&mut start).and_then(|_| source.seek(SeekFrom::Start(0)));
        read.map_err(|error| format!("it cannot be read: {error}"))?;
        if start.is_empty() {
            return Err("the file is empty".into());
        }
        let container = Container::of(&start).ok_or("it is neither WAV, FLAC, MP3 nor Ogg Vorbis")?;
        caught(|| Decoder::open(source, container))
    }

    fn open(source: Box<dyn MediaSource>, container: Container) -> Result<Decoder, String> {
        let wrong = |error: Error| match cut_off(&error) {
            true => "it ends before its header is complete".to_string(),
            false => format!("it cannot be decoded: {error}"),
        };
        let stream = MediaSourceStream::new(source, Default::default());
        let (probe, codecs) = (symphonia::default::get_probe(), symphonia::default::get_codecs());
        let options = (FormatOptions::default(), MetadataOptions::default());
        let format = probe.probe(&Hint::new(), stream, options.0, options.1).map_err(wrong)?;
        let track = format.default_track(TrackType::Audio).ok_or("it has no sound in it")?;
        let parameters = track.codec_params.as_ref().and_then(|all| all.audio());
        let parameters = parameters.ok_or("it does not say how its sound is coded")?;
        let rate = parameters.sample_rate.ok_or("it does not say how many samples a second has")? as usize;
        if !RATES.contains(&rate) {
            return Err(format!("it has {rate} samples a second, expected {} to {}", RATES.start(), RATES.end()));
        }
        let channels = parameters.channels.as_ref().map_or(1, |channels| channels.count());
        if channels == 0 || channels > MOST_CHANNELS {
            return Err(format!("it has {channels} channels, expected 1 to {MOST_CHANNELS}"));
        }
        let bytes = u64::from(parameters.bits_per_sample.unwrap_or(8) / 8).max(1) * channels as u64;
        let announced = match container {
            Container::Flac => track.num_frames,
            Container::Wav => track.num_frames.filter(|frames| {
                let claimed = frames.saturating_mul(bytes);
                UNKNOWN_BYTES.iter().all(|unknown| !unknown.contains(&claimed))
            }),
            Container::Ogg | Container::Mpeg => None,
        };
        let decoder = codecs.make_audio_decoder(parameters, &AudioDecoderOptions::default()).map_err(wrong)?;
        let track = track.id;
        Ok(Decoder { format, decoder, track, rate, announced, decoded: 0, packets: 0, damaged: 0, container })
    }

    pub fn rate(&self) -> usize {
        self.rate
    }

    /// The next samples; `None` at the end.
    pub fn next(&mut self) -> Result<Option<Vec<f32>>, String> {
        caught(|| self.decode())
    }

    fn decode(&mut self) -> Result<Option<Vec<f32>>, String> {
        loop {
            let packet = match self.format.next_packet() {
                Ok(Some(packet)) => packet,
                Ok(None) => return self.end(),
                Err(error) if cut_off(&error) => return self.end(),
                Err(error) => return Err(format!("it is damaged after {:.2} s: {error}", self.seconds())),
            };
            if packet.track_id != self.track {
                continue;
            }
            self.packets += 1;
            let buffer = match self.decoder.decode(&packet) {
                Ok(buffer) => buffer,
                // A clip cut out of a longer stream may start and end in the middle of a frame.
                Err(Error::DecodeError(_)) if self.container == Container::Mpeg => {
                    self.damaged += 1;
                    continue;
                }
                Err(error) => return Err(format!("it is damaged after {:.2} s: {error}", self.seconds())),
            };
            let (channels, rate) = (buffer.spec().channels().count(), buffer.spec().rate() as usize);
            if rate != self.rate || channels == 0 || channels > MOST_CHANNELS {
                return Err(format!("its rate or its channels change after {:.2} s", self.seconds()));
            }
            let mut samples: Vec<f32> = Vec::new();
            buffer.copy_to_vec_interleaved(&mut samples);
            if let Some(at) = samples.iter().position(|sample| !sample.is_finite()) {
                let at = self.decoded + (at / channels) as u64;
                return Err(format!("sample {at} is not a finite number"));
            }
            if let Some(at) = samples.iter().position(|sample| sample.abs() > LOUDEST) {
                let (value, at) = (samples[at], self.decoded + (at / channels) as u64);
                return Err(format!("sample {at} is {value:e}, expected a number from −1 to 1"));
            }
            let mono: Vec<f32> = match channels {
                1 => samples,
                _ => samples.chunks_exact(channels).map(|all| all.iter().sum::<f32>() / channels as f32).collect(),
            };
            self.decoded += mono.len() as u64;
            if !mono.is_empty() {
                return Ok(Some(mono));
            }
        }
    }

    /// Checks at the end of the stream.
    fn end(&self) -> Result<Option<Vec<f32>>, String> {
        match self.announced {
            Some(announced) if self.decoded < announced => {
                Err(format!("it is cut off: {} of {announced} samples are there", self.decoded))
            }
            _ if self.decoded == 0 => Err("it has no samples".into()),
            _ if self.damaged * 2 > self.packets => {
                Err(format!("{} of its {} packets are damaged", self.damaged, self.packets))
            }
            _ => Ok(None),
        }
    }

    fn seconds(&self) -> f64 {
        self.decoded as f64 / self.rate as f64
    }
}
