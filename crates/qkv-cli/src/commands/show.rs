//! The command `qkv show`: a text is translated, gone on with or read, or an image is seen, and what the model attended to on the
//! way is drawn, measured or written. It puts the parts in order: which model, which text, which attention, in which form.
//!
//! | module | owns |
//! | --- | --- |
//! | `asked` | the choices of the command, and what was chosen |
//! | `chosen` | which layer and heads were meant |
//! | `shaded` | documents and images, shown as what they are |
//! | `file` | what a file becomes, by the end of its name |
//! | `table` | layers and heads as lines and as JSON |

mod asked;
mod chosen;
mod file;
mod shaded;
mod table;

pub(crate) use asked::{Asked, CHOICES, after_help};

use crate::failure::Failure;
use crate::say::Say;
use crate::terminal::Paper;
use crate::translate::Lines;
use crate::{embedded, threads};
use asked::What;
use chosen::Chosen;
use file::Form;
use qkv_explore::{Agreement, Observer, Recording};
use qkv_models::image::Image;
use qkv_nn::Machine;
use std::io::{self, IsTerminal, Write};
use std::path::Path;

/// What names of layers are asked of, where no text was given.
const ANY: &str = "1";

/// Shows what was asked.
pub(crate) fn show(asked: &Asked, say: Say<'_>) -> Result<(), Failure> {
    // Before anything is computed: a name that nothing can be written to.
    let form = asked.out.as_deref().map(Form::of).transpose()?;
    threads::on(asked.threads, || {
        let machine = Machine::new(rayon::current_num_threads());
        if let Some(path) = &asked.recording {
            let recording = qkv_explore::file::open(path, &asked.file())?;
            let desk = Desk { asked, model: None, machine, form };
            return say(&desk.told(recording)?).map(drop);
        }
        let model = match asked.model.as_deref() {
            None => embedded::translator(None)?.into(),
            Some(path) => opened(path, asked.image.as_deref())?,
        };
        let seen = model.images().first().map(|&name| name.to_owned());
        let desk = Desk { asked, model: Some(model), machine, form };
        if let Some(name) = seen {
            return say(&desk.shown(&name)?).map(drop);
        }
        match &asked.text {
            Some(text) => say(&desk.shown(text)?).map(drop),
            None if asked.what == What::List => say(&desk.shown(ANY)?).map(drop),
            None if form.is_some() => say(&desk.shown(&only_line()?)?).map(drop),
            None => lines(&desk, say),
        }
    })
}

/// Any model, with the image that it is to see.
fn opened(path: &Path, image: Option<&Path>) -> Result<Observer, Failure> {
    if !path.exists() {
        return Err(Failure::new(format!("`{}` is no folder", path.display())).hint(
            "a model is a folder with `config.json`, `tokenizer.json` and `model.safetensors`, or a `.gguf` file",
        ));
    }
    let image = image.map(|file| Ok::<_, Failure>((file.display().to_string(), Image::open(file)?))).transpose()?;
    let model = Observer::open(path)?.with_images(image.into_iter().collect())?;
    match &model {
        Observer::Vit(_, images) if images.is_empty() => {
            Err(Failure::new("the model sees images and reads no text").hint("name one with `--image FILE`"))
        }
        _ => Ok(model),
    }
}

/// The one line of stdin that has text.
fn only_line() -> Result<String, Failure> {
    let (mut lines, mut texts) = (Lines::stdin(), Vec::new());
    loop {
        let portion = lines.next(usize::MAX)?;
        if portion.is_empty() {
            break;
        }
        texts.extend(portion.into_iter().map(|line| line.text).filter(|text| !text.trim().is_empty()));
    }
    match texts.len() {
        1 => Ok(texts.remove(0)),
        0 => Err(Failure::new("there is no text to look at").hint("give a sentence")),
        count => Err(Failure::new(format!("stdin has {count} lines, a file shows one"))
            .hint("give one line, or draw in the terminal without `--out`")),
    }
}

/// Shows each line of stdin that has text.
fn lines(desk: &Desk<'_>, say: Say<'_>) -> Result<(), Failure> {
    if io::stdin().is_terminal() {
        let _ = writeln!(io::stderr(), "A line is drawn when it is entered; Ctrl-D ends.");
    }
    let (mut lines, mut some) = (Lines::stdin(), false);
    loop {
        let portion = lines.next(1)?;
        let Some(line) = portion.first() else { break };
        if line.text.trim().is_empty() {
            continue;
        }
        let parting = if some && !desk.asked.json { "\n" } else { "" };
        some = true;
        if !say(&format!("{parting}{}", desk.shown(&line.text)?))? {
            return Ok(());
        }
    }
    if some { Ok(()) } else { Err(Failure::new("there is no text to look at").hint("give a sentence")) }
}

/// A model with all that a text needs.
struct Desk<'a> {
    asked: &'a Asked,
    /// None where a recording is shown.
    model: Option<Observer>,
    machine: Machine,
    form: Option<Form>,
}

impl Desk<'_> {
    /// What is told of a text; a file is written on the way.
    fn shown(&self, text: &str) -> Result<String, Failure> {
        let Some(model) = &self.model else { unreachable!("a text is shown by a model") };
        let target = match self.asked.what {
            What::List if self.asked.text.is_none() => Some(ANY),
            _ => self.asked.target.as_deref(),
        };
        self.told(model.record(text.trim(), target, &self.machine)?)
    }

    fn told(&self, mut recording: Recording) -> Result<String, Failure> {
        let asked = self.asked;
        match asked.what {
            What::List => return Ok(table::layers(&recording, asked)),
            What::Heads => {
                let importance = match &self.model {
                    Some(model) => model.importance(&recording, &self.machine)?,
                    None => None,
                };
                if let Some(importance) = importance {
                    for (layer, importance) in recording.layers.iter_mut().zip(importance) {
                        layer.importance = Some(importance);
                    }
                }
                return table::heads(&recording, asked.json);
            }
            What::Picture => {}
        }
        if let (Some(form), Some(path)) = (self.form, &asked.out) {
            return form.write(path, &recording, asked).map(|()| String::new());
        }
        // Neither a text nor a model moves the cursor.
        let calm = |text: String| -> String { text.chars().map(|c| if c.is_control() { '·' } else { c }).collect() };
        if let (true, Some(told)) = (asked.json, shaded::json(&recording, asked)?) {
            return Ok(told);
        }
        if let (false, Some(drawn)) = (asked.json, shaded::drawn(&recording, asked)?) {
            let output = recording.output.clone().unwrap_or_default();
            let heading = match recording.form {
                Some(qkv_explore::Form::Image { .. }) => format!("{} → {output}", recording.text),
                _ => output,
            };
            return Ok(format!("{}\n{drawn}", calm(heading)));
        }
        let chosen = Chosen::of(&recording, asked)?;
        if asked.json {
            return chosen.json(&recording, asked);
        }
        let paper = Paper::of_stdout();
        let drawn = chosen.picture(asked).terminal(paper.width, paper.colours());
        let heading = match &recording.output {
            Some(output) => calm(format!("{} → {output}", recording.text)) + "\n",
            None => String::new(),
        };
        let agreement = chosen.agreement(asked)?.map_or(String::new(), |found| {
            let Agreement { precision, recall, error_rate } = found;
            format!("\nagreement  precision {precision:.3} · recall {recall:.3} · error rate {error_rate:.3}\n")
        });
        Ok(format!("{heading}{}\n\n{drawn}{agreement}", chosen.title))
    }
}
