//! Sound files and spectrograms: every format, hostile files, and the log-mel spectrogram against its definition.

use qkv_formats::audio::log_mel::{FREQUENCIES, HOP, WINDOW};
use qkv_formats::audio::{MelFilters, Recording, SAMPLE_RATE, Spectrogram, wav};
use std::f64::consts::TAU;

fn samples_of(bytes: Vec<u8>) -> Result<Vec<f32>, String> {
    let pieces = Recording::from_bytes(bytes, "a.wav").samples().and_then(Iterator::collect::<Result<Vec<_>, _>>);
    pieces.map(|pieces| pieces.concat()).map_err(|error| error.to_string())
}

fn tone(count: usize) -> Vec<f32> {
    (0..count).map(|at| 0.5 * (at as f64 * 440.0 / SAMPLE_RATE as f64 * TAU).sin() as f32).collect()
}

/// A WAV file of any kind: format tag, channels, rate, bits and data.
fn wav_of(tag: u16, channels: u16, rate: u32, bits: u16, data: &[u8]) -> Vec<u8> {
    let block = channels * bits / 8;
    let mut bytes = [b"RIFF", &(36 + data.len() as u32).to_le_bytes()[..], b"WAVEfmt ", &16u32.to_le_bytes()].concat();
    for word in [tag, channels] {
        bytes.extend(word.to_le_bytes());
    }
    for word in [rate, rate * u32::from(block)] {
        bytes.extend(word.to_le_bytes());
    }
    for word in [block, bits] {
        bytes.extend(word.to_le_bytes());
    }
    bytes.extend_from_slice(b"data");
    bytes.extend((data.len() as u32).to_le_bytes());
    bytes.extend_from_slice(data);
    bytes
}

#[test]
fn every_kind_of_wav_is_read() {
    let kinds: [(u16, u16, Vec<u8>); 5] = [
        (1, 8, vec![128, 192, 64]),
        (1, 16, [0i16, 16384, -16384].iter().flat_map(|x| x.to_le_bytes()).collect()),
        (1, 24, vec![0, 0, 0, 0, 0, 0x40, 0, 0, 0xc0]),
        (1, 32, [0i32, 1 << 30, -(1 << 30)].iter().flat_map(|x| x.to_le_bytes()).collect()),
        (3, 32, [0.0f32, 0.5, -0.5].iter().flat_map(|x| x.to_le_bytes()).collect()),
    ];
    for (tag, bits, data) in kinds {
        assert_eq!(samples_of(wav_of(tag, 1, 16_000, bits, &data)).unwrap(), [0.0, 0.5, -0.5], "{bits} bits");
    }
}

#[test]
fn channels_are_averaged() {
    let data: Vec<u8> = [16384i16, 0, -16384, 16384].iter().flat_map(|x| x.to_le_bytes()).collect();
    assert_eq!(samples_of(wav_of(1, 2, 16_000, 16, &data)).unwrap(), [0.25, 0.0]);
}

#[test]
fn flac_is_exact_and_lossy_formats_are_close() {
    let expected = tone(3200);
    let files: [(&str, &[u8], f32); 3] = [
        ("flac", include_bytes!("../sounds/tone.flac"), 1e-4),
        ("mp3", include_bytes!("../sounds/tone.mp3"), 0.05),
        ("ogg", include_bytes!("../sounds/tone.ogg"), 0.05),
    ];
    for (name, bytes, tolerance) in files {
        let found = samples_of(bytes.to_vec()).unwrap();
        // A codec may add a delay: compared at the shift with the best agreement.
        let off = |shift: usize| {
            let pairs = found.iter().skip(shift + 400).zip(&expected[400..2400]);
            pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
        };
        let best = (0..found.len().saturating_sub(2800).min(1200)).map(off).fold(f32::MAX, f32::min);
        assert!(best <= tolerance, "{name}: {} samples, off by {best}", found.len());
    }
}

#[test]
fn a_bad_file_is_named_and_described() {
    let whole = wav::to_bytes(&tone(800), 16_000);
    let flac = include_bytes!("../sounds/tone.flac");
    let nan: Vec<u8> = [0.0f32, 1.0, f32::NAN].iter().flat_map(|x| x.to_le_bytes()).collect();
    let cases: [(Vec<u8>, &str); 7] = [
        (Vec::new(), "the file is empty"),
        (b"Dear diary, today I recorded nothing at all.".to_vec(), "neither WAV, FLAC, MP3 nor Ogg Vorbis"),
        (wav::to_bytes(&[], 16_000), "no samples"),
        (whole[..400].to_vec(), "cut off: 178 of 800 samples"),
        (flac[..flac.len() - 300].to_vec(), "of 3200 samples are there"),
        (wav_of(3, 1, 16_000, 32, &nan), "sample 2 is not a finite number"),
        (wav_of(1, 1, 4_000_000_000 / 2, 16, &[0; 64]), "2000000000 samples a second"),
    ];
    for (bytes, expected) in cases {
        let error = samples_of(bytes).unwrap_err();
        assert!(error.starts_with("`a.wav`: sound: ") && error.contains(expected), "{error}");
    }
}

#[test]
fn a_pipe_without_a_length_is_read_to_its_end() {
    // The lengths that `ffmpeg`, `arecord` and `sox` write into a pipe.
    for [file, data] in [[u32::MAX; 2], [0x8000_0024, 0x8000_0000], [0x7fff_f024, 0x7fff_f000]] {
        let mut bytes = wav::to_bytes(&tone(800), 16_000);
        bytes[4..8].copy_from_slice(&file.to_le_bytes());
        bytes[40..44].copy_from_slice(&data.to_le_bytes());
        let recording = Recording::from_stream(&bytes[..], "stdin").unwrap();
        for _ in 0..2 {
            let count: usize = recording.samples().unwrap().map(|piece| piece.unwrap().len()).sum();
            assert_eq!(count, 800, "{data:x}");
        }
    }
}

/// The definition in plain loops: mirrored at the start, silent after the end, every frame by a Fourier sum.
fn definition(samples: &[f32], filters: &MelFilters) -> Vec<Vec<f64>> {
    let at = |index: i64| match index {
        index if index < 0 => samples.get(-index as usize).copied().unwrap_or(0.0),
        index => samples.get(index as usize).copied().unwrap_or(0.0),
    };
    let mut frames = Vec::new();
    for frame in 0..=samples.len() / HOP {
        let start = (frame * HOP) as i64 - WINDOW as i64 / 2;
        let power: Vec<f64> = (0..FREQUENCIES)
            .map(|k| {
                let (mut re, mut im) = (0.0, 0.0);
                for n in 0..WINDOW {
                    let hann = 0.5 - 0.5 * (TAU * n as f64 / WINDOW as f64).cos();
                    let (x, angle) = (f64::from(at(start + n as i64)) * hann, TAU * (k * n) as f64 / WINDOW as f64);
                    re += x * angle.cos();
                    im -= x * angle.sin();
                }
                re * re + im * im
            })
            .collect();
        let band = |row: &[f32]| row.iter().zip(&power).map(|(w, p)| f64::from(*w) * p).sum::<f64>().max(1e-10).log10();
        frames.push(filters.weights().chunks_exact(FREQUENCIES).map(band).collect());
    }
    let loudest = frames.iter().flatten().copied().fold(f64::MIN, f64::max);
    frames.pop();
    frames
        .into_iter()
        .map(|frame: Vec<f64>| frame.into_iter().map(|x| (x.max(loudest - 8.0) + 4.0) / 4.0).collect())
        .collect()
}

#[test]
fn the_spectrogram_is_its_definition_in_windows_of_any_order() {
    let mut samples = tone(3333);
    samples.iter_mut().enumerate().for_each(|(at, x)| *x *= (at as f32 / 3333.0) + 0.1 * ((at * at) as f32).sin());
    // Quantized as in the file.
    let samples: Vec<f32> = samples.iter().map(|x| (x * 32768.0).round() / 32768.0).collect();
    let filters = MelFilters::slaney(20);
    let expected = definition(&samples, &filters);
    let recording = Recording::from_bytes(wav::to_bytes(&samples, 16_000), "a.wav");
    let mut spectrogram = Spectrogram::new(&recording, &filters).unwrap();
    assert_eq!((spectrogram.frames(), expected.len()), (20, 20));
    assert!((spectrogram.seconds() - 3333.0 / 16_000.0).abs() < 1e-9);
    for (from, content, length) in [(0, 20, 30), (3, 5, 5), (4, 16, 20), (18, 2, 3), (0, 20, 20), (20, 0, 2)] {
        let window = spectrogram.window(from, content, length).unwrap();
        assert_eq!(window.len(), length * 20);
        for (at, frame) in window.chunks_exact(20).enumerate() {
            for (band, &found) in frame.iter().enumerate() {
                let expected = if at < content { expected[from + at][band] } else { 0.0 };
                assert!((f64::from(found) - expected).abs() < 2e-4, "{from} + {at}, {band}: {found} {expected}");
            }
        }
    }
}

#[test]
fn filters_have_unit_area_and_overlap_by_half() {
    for bands in [80, 128] {
        let filters = MelFilters::slaney(bands);
        let width = SAMPLE_RATE as f64 / WINDOW as f64;
        // High bands are wide enough for the sum over bins to be near the area.
        for row in filters.weights().chunks_exact(FREQUENCIES).skip(bands * 3 / 4) {
            let area: f64 = row.iter().map(|&x| f64::from(x) * width).sum();
            assert!((area - 1.0).abs() < 0.05, "{area}");
        }
    }
}

#[test]
fn a_recording_shorter_than_a_window_has_a_spectrogram() {
    for count in [1, 30, 160, 201] {
        let recording = Recording::from_bytes(wav::to_bytes(&tone(count), 16_000), "a.wav");
        let filters = MelFilters::slaney(80);
        let mut spectrogram = Spectrogram::new(&recording, &filters).unwrap();
        assert_eq!(spectrogram.frames(), count / HOP);
        assert!(spectrogram.window(0, count / HOP, 4).unwrap().iter().all(|x| x.is_finite()));
    }
}
