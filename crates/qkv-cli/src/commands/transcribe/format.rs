//! Segments as text, SubRip, WebVTT or JSON.

use qkv_models::{Segment, Transcript};
use serde_json::{Value, json};
use std::path::Path;

/// What is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    Text,
    SubRip,
    WebVtt,
    Json,
}

/// The output of one recording.
pub(super) struct Cues {
    format: Format,
    words: bool,
    /// Subtitles so far.
    number: usize,
    started: bool,
    /// Collected for JSON, which is written at the end.
    segments: Vec<Value>,
}

/// `00:01:02.345`.
pub(super) fn clock(seconds: f64, point: char) -> String {
    let millis = (seconds * 1000.0).round().max(0.0) as u64;
    let (hours, minutes, seconds) = (millis / 3_600_000, millis / 60_000 % 60, millis / 1000 % 60);
    format!("{hours:02}:{minutes:02}:{seconds:02}{point}{:03}", millis % 1000)
}

impl Cues {
    pub fn new(format: Format, words: bool) -> Cues {
        Cues { format, words, number: 0, started: false, segments: Vec::new() }
    }

    /// The header, which is written once, before everything else.
    fn header(&mut self) -> &'static str {
        let first = !std::mem::replace(&mut self.started, true);
        if first && self.format == Format::WebVtt { "WEBVTT\n\n" } else { "" }
    }

    /// The output for a segment, as soon as it is recognized.
    pub fn segment(&mut self, segment: &Segment) -> String {
        if self.format == Format::Json {
            let mut value = serde_json::to_value(segment).expect("plain values");
            if !self.words {
                value.as_object_mut().expect("a struct").remove("words");
            }
            self.segments.push(value);
            return String::new();
        }
        let pieces: Vec<(f64, f64, &str)> = match self.words {
            true => segment.words.iter().map(|word| (word.start, word.end, word.word.trim())).collect(),
            false => vec![(segment.start, segment.end, segment.text.trim())],
        };
        let mut written = self.header().to_owned();
        pieces.into_iter().for_each(|(start, end, text)| written += &self.cue(start, end, text));
        written
    }

    fn cue(&mut self, start: f64, end: f64, text: &str) -> String {
        self.number += 1;
        match self.format {
            Format::Text if self.words => format!("{start:.2}\t{end:.2}\t{text}\n"),
            Format::SubRip => {
                format!("{}\n{} --> {}\n{}\n\n", self.number, clock(start, ','), clock(end, ','), one_arrow(text))
            }
            Format::WebVtt => format!("{} --> {}\n{}\n\n", clock(start, '.'), clock(end, '.'), one_arrow(text)),
            Format::Text | Format::Json => format!("{text}\n"),
        }
    }

    /// The output at the end.
    pub fn footer(mut self, name: &Path, transcript: &Transcript) -> String {
        if self.format != Format::Json {
            return self.header().to_owned();
        }
        let text: String = self.segments.iter().filter_map(|segment| segment["text"].as_str()).collect();
        let value = json!({
            "file": name.display().to_string(),
            "language": transcript.language,
            "language_probability": transcript.language_probability,
            "seconds": transcript.seconds,
            "text": text.trim(),
            "segments": self.segments,
        });
        format!("{value}\n")
    }
}

/// An arrow in a text would look like the start of another cue.
fn one_arrow(text: &str) -> String {
    text.replace("-->", "->")
}

#[cfg(test)]
mod tests {
    use super::*;
    use qkv_models::Word;

    fn segment() -> Segment {
        let word = |start, end, word: &str| Word { start, end, word: word.into(), probability: 0.5 };
        Segment {
            start: 3661.5,
            end: 3662.0,
            text: " a --> b".into(),
            tokens: vec![1],
            temperature: 0.0,
            average_log_probability: -0.5,
            compression_ratio: 1.0,
            no_speech_probability: 0.0,
            words: vec![word(3661.5, 3661.75, " a"), word(3661.75, 3662.0, " b")],
        }
    }

    #[test]
    fn subtitles_have_numbers_and_times() {
        let mut cues = Cues::new(Format::SubRip, false);
        assert_eq!(cues.segment(&segment()), "1\n01:01:01,500 --> 01:01:02,000\na -> b\n\n");
        assert_eq!(cues.segment(&segment()).lines().next(), Some("2"));
        let mut cues = Cues::new(Format::WebVtt, true);
        assert!(cues.segment(&segment()).starts_with("WEBVTT\n\n01:01:01.500 --> 01:01:01.750\na\n\n01:01:01.750"));
    }

    #[test]
    fn words_of_text_are_columns_and_json_has_everything() {
        assert_eq!(Cues::new(Format::Text, true).segment(&segment()), "3661.50\t3661.75\ta\n3661.75\t3662.00\tb\n");
        let mut cues = Cues::new(Format::Json, false);
        assert_eq!(cues.segment(&segment()), "");
        let transcript = Transcript { language: "en".into(), language_probability: 1.0, seconds: 4000.0 };
        let value: Value = serde_json::from_str(&cues.footer(Path::new("a.wav"), &transcript)).unwrap();
        assert_eq!((&value["text"], &value["segments"][0]["words"]), (&json!("a --> b"), &Value::Null));
    }
}
