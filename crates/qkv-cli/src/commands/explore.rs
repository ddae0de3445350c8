//! The command `qkv explore`: a page, served by the program itself, that shows what a model attends to.

mod asked;

pub(crate) use asked::{Asked, CHOICES, after_help};

use crate::failure::Failure;
use crate::say::Say;
use crate::{embedded, threads};
use qkv_explore::server::{Served, Server, Settings};
use qkv_explore::{Observer, file};
use qkv_models::image::Image;
use qkv_nn::Machine;
use std::path::Path;

/// What the embedded model starts from: the first is shown at once.
const EXAMPLES: &[&str] = &[
    "好久不见",
    "我昨天在图书馆遇到了一个老朋友。",
    "你能告诉我怎么去火车站吗？",
    "她说她明天不来。",
    "如果下雨，我们就待在家里。",
];

/// Serves the page until the program is ended.
pub(crate) fn explore(asked: &Asked, say: Say<'_>) -> Result<(), Failure> {
    // Requests are answered on threads of their own, which are in no pool but the first.
    threads::everywhere(asked.threads)?;
    let mut settings = Settings::new(Machine::new(rayon::current_num_threads()));
    (settings.address, settings.port) = (asked.address, asked.port);
    match &asked.recording {
        Some(path) => {
            settings.recording = Some(file::open(path, &asked.file()?)?);
            if !asked.models.is_empty() || !asked.text.is_empty() {
                settings.models = models(asked)?;
            }
        }
        None => settings.models = models(asked)?,
    }
    let own = asked.models.is_empty() && asked.text.is_empty();
    settings.examples = match own {
        true => EXAMPLES.iter().map(|&text| text.to_owned()).collect(),
        false if !asked.images.is_empty() => {
            settings.models.iter().flat_map(|served| served.model.images()).map(str::to_owned).collect()
        }
        false if asked.text.is_empty() => vec![EXAMPLES[0].to_owned()],
        false => asked.text.clone(),
    };
    let server = Server::bind(settings)?;
    let url = server.url();
    say(&format!("{url}\nCtrl-C ends it.\n"))?;
    if server.address().ip().is_unspecified() {
        say("From elsewhere, put this machine's name or address in its place.\n")?;
    }
    if !server.address().ip().is_loopback() {
        say("Whoever has this address can use the model: it is served beyond this machine.\n")?;
    }
    if asked.open {
        open(&url)?;
    }
    Ok(server.run(std::future::pending())?)
}

/// The models in these folders, or the embedded one.
fn models(asked: &Asked) -> Result<Vec<Served>, Failure> {
    if asked.models.is_empty() {
        let model = embedded::translator(None)?.into();
        let note = "the embedded model, Chinese to English".to_owned();
        return Ok(vec![Served { name: embedded::NAME.to_owned(), note, model }]);
    }
    let served = |folder: &std::path::PathBuf| {
        let name = folder.file_name().unwrap_or(folder.as_os_str()).to_string_lossy().into_owned();
        let model = Observer::open(folder)?.with_images(images(&asked.images)?)?;
        if let (Observer::Vit(..), []) = (&model, &asked.images[..]) {
            return Err(Failure::new(format!("the model in `{}` sees images", folder.display()))
                .hint("name one with `--image FILE`"));
        }
        let note = format!("{}, {}", folder.display(), model.note());
        Ok(Served { name, note, model })
    };
    asked.models.iter().map(served).collect()
}

/// Images by the names of their files, told apart where two are called the same.
fn images(paths: &[std::path::PathBuf]) -> Result<Vec<(String, Image)>, Failure> {
    let mut images: Vec<(String, Image)> = Vec::with_capacity(paths.len());
    for path in paths {
        let short = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        let taken = images.iter().any(|(name, _)| *name == short);
        let name = if taken { path.display().to_string() } else { short };
        // The page writes a name in one line, whatever is in it.
        let name = name.split_whitespace().collect::<Vec<_>>().join(" ");
        images.push((name, Image::open(path)?));
    }
    Ok(images)
}

/// Opens a page with whatever this system opens pages with.
fn open(url: &str) -> Result<(), Failure> {
    let program = if cfg!(target_os = "macos") {
        "open"
    } else if cfg!(target_os = "windows") {
        "explorer"
    } else {
        "xdg-open"
    };
    let quiet = std::process::Stdio::null;
    let started = std::process::Command::new(program).arg(url).stdin(quiet()).stdout(quiet()).stderr(quiet()).spawn();
    let failed = |e| Failure::new(format!("`{program}` cannot be started: {e}")).hint(format!("open {url} by hand"));
    started.map(drop).map_err(failed)
}

/// The lines of a file as tokens.
fn lines(path: &Path) -> Result<Vec<String>, Failure> {
    let text = std::fs::read_to_string(path).map_err(|e| qkv_models::Error::file("read", path, e))?;
    Ok(text.lines().map(str::to_owned).collect())
}
