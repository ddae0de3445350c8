//! `qkv speak`: text in, sound out, and which letter is spoken at each moment.

use crate::arguments::{Argument, Arguments, Kind, Matches, THREADS};
use crate::atomic_file::OutputPath;
use crate::command::{Command, Run, Status};
use crate::device::{BATCH_INVARIANT, DEVICE, InferenceDevice};
use crate::failure::Failure;
use crate::output::{Print, note};
use crate::terminal::TerminalStyle;
use crate::{input, threads};
use qkv_explore::Matrix;
use qkv_explore::draw::{Fonts, Picture};
use qkv_models::audio::{SAMPLE_RATE, wav};
use qkv_models::{SpeakOptions, Speaker, Speech, diagonal_share};
use serde_json::json;
use std::io;
use std::path::PathBuf;

pub(super) const COMMAND: Command =
    Command::new("speak", "Speak a text with a trained voice, and show its alignment", ARGUMENTS, |matches| {
        Ok(Box::new(SpeakArgs::parse(matches)?))
    })
    .examples(&[
        ("qkv speak \"seven\" --voice runs/spoken-digits --out seven.wav", "A word"),
        ("qkv speak \"seven\" --voice runs/spoken-digits --alignment", "Which letter was said when"),
        (
            "qkv speak --voice runs/kathleen --out talk.wav --drawing talk.svg < talk.txt",
            "A text, and its alignment, drawn",
        ),
    ]);

const ARGUMENTS: Arguments = &[
    (
        "Text and voice",
        &[
            Argument::new("text", Kind::Text, "Text to speak; stdin by default")
                .value("TEXT")
                .positional()
                .repeatable(),
            Argument::new("voice", Kind::Path, "Folder of a model of kind `voice`").value("DIR").required(),
            Argument::new("iterations", Kind::Integer(0, 10_000), "Iterations that turn the spectrogram into sound")
                .value("N")
                .default("60"),
            Argument::new("seed", Kind::SEED, "Seed of the pre-net's dropout and of the first phases")
                .value("N")
                .default("1"),
        ],
    ),
    (
        "Output",
        &[
            Argument::new("out", Kind::Path, "Write the sound to this WAV file").value("FILE"),
            Argument::new("alignment", Kind::Switch, "Print the attention from times to letters"),
            Argument::new("drawing", Kind::Path, "Save a picture of it to this file (`.svg` or `.png`)").value("FILE"),
            Argument::new("json", Kind::Switch, "One JSON object for each sentence: letters, seconds, alignment"),
        ],
    ),
    ("Computation", &[DEVICE, BATCH_INVARIANT, THREADS]),
];

/// The longest text from stdin, in bytes.
const LONGEST: u64 = 1 << 20;
/// Seconds of silence between sentences.
const PAUSE: f64 = 0.25;

struct SpeakArgs {
    texts: Vec<String>,
    voice: PathBuf,
    options: SpeakOptions,
    out: Option<PathBuf>,
    alignment: bool,
    drawing: Option<PathBuf>,
    json: bool,
    threads: Option<usize>,
    device: InferenceDevice,
}

impl SpeakArgs {
    fn parse(matches: &Matches<'_>) -> Result<SpeakArgs, String> {
        let defaults = SpeakOptions::default();
        let args = SpeakArgs {
            texts: matches.texts("text"),
            voice: matches.required_path("voice"),
            options: SpeakOptions {
                iterations: matches.count("iterations").unwrap_or(defaults.iterations),
                seed: matches.seed("seed").unwrap_or(defaults.seed),
            },
            out: matches.path("out"),
            alignment: matches.switch("alignment"),
            drawing: matches.path("drawing"),
            json: matches.switch("json"),
            threads: matches.count("threads"),
            device: InferenceDevice::parse(matches),
        };
        if args.out.is_none() && args.drawing.is_none() && !args.alignment && !args.json {
            return Err("name a file with `--out`, or ask for the `--alignment`".into());
        }
        Ok(args)
    }
}

/// The alignment of a sentence: one row per letter, one column per step, like a spectrogram.
fn matrix(speech: &Speech) -> Matrix {
    let shown = |letter: &String| if letter.trim().is_empty() { "␣".to_owned() } else { letter.clone() };
    Matrix {
        rows: speech.letters.iter().map(shown).collect(),
        columns: (0..speech.alignment.len()).map(|at| format!("{:.2}", at as f64 * speech.step)).collect(),
        weights: (0..speech.letters.len())
            .map(|letter| speech.alignment.iter().map(|row| row[letter]).collect())
            .collect(),
    }
}

impl Run for SpeakArgs {
    fn run(&self, print: Print<'_>) -> Result<Status, Failure> {
        threads::on(self.threads, || {
            input::check(&self.voice.join("config.json"))?;
            let voice = Speaker::open(&self.voice)?;
            let machine = self.device.machine()?;
            let text = match &self.texts[..] {
                [] => input::text_of(io::stdin(), "stdin", LONGEST)?,
                texts => texts.join(" "),
            };
            // Before computing anything: is there something to say, and can it be written?
            let phrases = voice.phrases(&text)?;
            let out = self.out.as_ref().map(|path| OutputPath::new(path, None)).transpose()?;
            let (mut samples, mut drawn) = (Vec::new(), None);
            for phrase in &phrases {
                let speech = voice.speak(phrase, &self.options, &machine)?;
                let seconds = speech.samples.len() as f64 / SAMPLE_RATE as f64;
                if !speech.ended {
                    note(format!("`{phrase}` did not end within {seconds:.1} seconds and was cut off"));
                }
                if !samples.is_empty() {
                    samples.resize(samples.len() + (PAUSE * SAMPLE_RATE as f64) as usize, 0.0);
                }
                samples.extend_from_slice(&speech.samples);
                let matrix = matrix(&speech);
                let mut text = String::new();
                if self.json {
                    let object = json!({
                        "text": phrase,
                        "seconds": seconds,
                        "ended": speech.ended,
                        "diagonal": diagonal_share(&speech.alignment),
                        "step": speech.step,
                        "letters": speech.letters,
                        "alignment": speech.alignment,
                    });
                    text = format!("{object}\n");
                } else if self.alignment {
                    let style = TerminalStyle::of_stdout();
                    text =
                        format!("{phrase}\n{}\n", Picture::from(matrix.clone()).terminal(style.width, style.colors()));
                }
                drawn.get_or_insert((phrase, matrix));
                if !text.is_empty() && !print(&text)? {
                    return Ok(Status::Done);
                }
            }
            if let (Some(path), Some((phrase, matrix))) = (&self.drawing, drawn) {
                let picture = Picture { title: Some(phrase.clone()), ..Picture::from(matrix) };
                let png = path.extension().is_some_and(|end| end.eq_ignore_ascii_case("png"));
                let output = OutputPath::new(path, None)?;
                match png {
                    true => output.write(&picture.png(2.0, &Fonts::of_system())?.bytes)?,
                    false => output.write(picture.svg()?.as_bytes())?,
                };
            }
            if let Some(out) = out {
                out.write(&wav::to_bytes(&samples, SAMPLE_RATE as u32))?;
                if !self.json && !self.alignment {
                    let seconds = samples.len() as f64 / SAMPLE_RATE as f64;
                    let path = self.out.as_ref().map(|path| path.display().to_string()).unwrap_or_default();
                    print(&format!("{path}\t{seconds:.2} s\n"))?;
                }
            }
            Ok(Status::Done)
        })
    }
}
