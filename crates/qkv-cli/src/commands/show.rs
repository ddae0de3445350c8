//! `qkv show`: what a model attended to, drawn in the terminal, measured, or written to a file.
//!
//! | module | owns |
//! | --- | --- |
//! | `args` | the arguments |
//! | `selected` | the layer and head to show |
//! | `shading` | documents with shaded words, images with shaded patches |
//! | `file` | the formats of `--out` |
//! | `table` | layers and heads as text and JSON |

mod args;
mod file;
mod file_format;
mod selected;
mod shading;
mod table;

use crate::command::{Command, Run, Status};
use crate::embedded::MODEL_FOLDER;
use crate::failure::Failure;
use crate::lines::{Lines, for_each_line};
use crate::output::{Print, note};
use crate::terminal::TerminalStyle;
use crate::{embedded, input, threads};
use args::{ARGUMENTS, EXAMPLES, ShowArgs, ShowMode, notes};
use file_format::FileFormat;
use qkv_explore::{Agreement, Observer, Recording};
use qkv_models::image::Image;
use qkv_nn::Machine;
use selected::SelectedAttention;
use std::io::{self, IsTerminal};
use std::path::Path;

/// The text for `--list` without a text: any will do.
const PLACEHOLDER: &str = "1";

pub(super) const COMMAND: Command =
    Command::new("show", "Draw, measure or export the attention of a model", ARGUMENTS, |matches| {
        Ok(Box::new(ShowArgs::parse(matches)?))
    })
    .examples(EXAMPLES)
    .notes(notes);

impl Run for ShowArgs {
    fn run(&self, print: Print<'_>) -> Result<Status, Failure> {
        // A file name without a known extension is refused before anything is computed.
        let format = self.out.as_deref().map(FileFormat::of).transpose()?;
        threads::on(self.threads, || {
            let machine = self.device.machine()?;
            if let Some(path) = &self.recording {
                input::check(path)?;
                let recording = qkv_explore::file::open(path, &self.recording_options())?;
                let session = ShowSession { args: self, model: None, machine, format };
                print(&session.render(recording)?)?;
                return Ok(Status::Done);
            }
            let model = match self.model.as_deref() {
                None => embedded::translator(None)?.into(),
                Some(path) => open(path, self.image.as_deref())?,
            };
            let image = model.inputs().first().map(|&name| name.to_owned());
            let session = ShowSession { args: self, model: Some(model), machine, format };
            let text = match (image, &self.text) {
                (Some(name), _) => Some(name),
                (None, Some(text)) => Some(text.clone()),
                (None, None) if self.mode == ShowMode::List => Some(PLACEHOLDER.into()),
                (None, None) if format.is_some() => Some(only_line()?),
                (None, None) => None,
            };
            match text {
                Some(text) => print(&session.show(&text)?).map(drop)?,
                None => session.show_lines(print)?,
            }
            Ok(Status::Done)
        })
    }
}

/// Opens a model, with the image that it looks at.
fn open(path: &Path, image: Option<&Path>) -> Result<Observer, Failure> {
    if !path.exists() {
        return Err(Failure::new(format!("`{}` does not exist", path.display())).hint(MODEL_FOLDER));
    }
    input::check(path)?;
    let image = image.map(|file| -> Result<_, Failure> {
        input::check(file)?;
        Ok((file.display().to_string(), Image::open(file)?))
    });
    let model = Observer::open(path)?.with_images(image.transpose()?.into_iter().collect())?;
    if model.lacks_image() {
        return Err(Failure::new("the model takes images, not texts").hint("name one with `--image FILE`"));
    }
    Ok(model)
}

/// The only line of stdin that is not blank.
fn only_line() -> Result<String, Failure> {
    let mut texts: Vec<String> = Lines::stdin().all()?.into_iter().map(|line| line.text).collect();
    texts.retain(|text| !text.trim().is_empty());
    match texts.len() {
        1 => Ok(texts.remove(0)),
        0 => Err(no_text()),
        count => Err(Failure::new(format!("stdin has {count} lines, but `--out` draws only one"))
            .hint("give one line, or draw in the terminal without `--out`")),
    }
}

fn no_text() -> Failure {
    Failure::new("there is no text to show").hint("give a sentence")
}

/// What it takes to show texts or a recording.
struct ShowSession<'a> {
    args: &'a ShowArgs,
    /// None for a recording.
    model: Option<Observer>,
    machine: Machine,
    format: Option<FileFormat>,
}

impl ShowSession<'_> {
    /// Shows each line of stdin that is not blank.
    fn show_lines(&self, print: Print<'_>) -> Result<(), Failure> {
        if io::stdin().is_terminal() {
            note("Enter a line to draw it; Ctrl-D ends.");
        }
        let (mut shown, mut any) = (0, false);
        for_each_line(
            Lines::stdin(),
            1,
            |batch| {
                let show = |text: &str| if text.trim().is_empty() { Ok(None) } else { self.show(text).map(Some) };
                Ok(batch.iter().map(|line| show(&line.text).map_err(|failure| line.failure(failure))).collect())
            },
            |batch| {
                for result in batch {
                    any |= !matches!(result, Some(None));
                    let Some(Some(text)) = result else { continue };
                    let separator = if shown > 0 && !self.args.json { "\n" } else { "" };
                    shown += 1;
                    if !print(&format!("{separator}{text}"))? {
                        return Ok(false);
                    }
                }
                Ok(true)
            },
        )?;
        if any { Ok(()) } else { Err(no_text()) }
    }

    /// Runs the model on a text and returns what to print. With `--out` it writes the file, too.
    fn show(&self, text: &str) -> Result<String, Failure> {
        let Some(model) = &self.model else { unreachable!("texts are shown by a model") };
        let target = match self.args.mode {
            ShowMode::List if self.args.text.is_none() => Some(PLACEHOLDER),
            _ => self.args.target.as_deref(),
        };
        self.render(model.record(text.trim(), target, &self.machine)?)
    }

    fn render(&self, mut recording: Recording) -> Result<String, Failure> {
        let args = self.args;
        match args.mode {
            ShowMode::List => return Ok(table::layers(&recording, args)),
            ShowMode::Heads => {
                let importance = match &self.model {
                    Some(model) => model.importance(&recording, &self.machine)?,
                    None => None,
                };
                for (layer, importance) in recording.layers.iter_mut().zip(importance.into_iter().flatten()) {
                    layer.importance = Some(importance);
                }
                return table::heads(&recording, args.json);
            }
            ShowMode::Picture => {}
        }
        if let (Some(format), Some(path)) = (self.format, &args.out) {
            return file::write(format, path, &recording, args).map(|()| String::new());
        }
        // Neither a text nor a model may move the terminal's cursor.
        let printable =
            |text: String| -> String { text.chars().map(|c| if c.is_control() { '·' } else { c }).collect() };
        if let (true, Some(json)) = (args.json, shading::to_json(&recording, args)?) {
            return Ok(json);
        }
        if let (false, Some(drawing)) = (args.json, shading::draw(&recording, args)?) {
            let output = recording.output.clone().unwrap_or_default();
            let heading = match recording.form {
                Some(qkv_explore::Form::Image { .. }) => format!("{} → {output}", recording.text),
                _ => output,
            };
            return Ok(format!("{}\n{drawing}", printable(heading)));
        }
        let selected = SelectedAttention::of(&recording, args)?;
        if args.json {
            return selected.to_json(&recording, args);
        }
        let style = TerminalStyle::of_stdout();
        let drawing = selected.picture(args).terminal(style.width, style.colors());
        let heading = match &recording.output {
            Some(output) => printable(format!("{} → {output}", recording.text)) + "\n",
            None => String::new(),
        };
        let agreement = selected.agreement(args)?.map_or(String::new(), |found| {
            let Agreement { precision, recall, error_rate } = found;
            format!("\nagreement  precision {precision:.3} · recall {recall:.3} · error rate {error_rate:.3}\n")
        });
        Ok(format!("{heading}{}\n\n{drawing}{agreement}", selected.title))
    }
}
