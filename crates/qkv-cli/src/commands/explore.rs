//! `qkv explore`: serves the explorer page, which shows what a model attends to. The page and its server are in
//! `qkv-explore`.

mod args;

use crate::command::{Command, Run, Status};
use crate::failure::Failure;
use crate::output::Print;
use crate::{embedded, input, threads};
use args::{ARGUMENTS, EXAMPLES, ExploreArgs};
use qkv::{Attention, Mask};
use qkv_explore::server::{ServedModel, Server, Settings};
use qkv_explore::{Observer, file};
use qkv_models::audio::Recording as Sound;
use qkv_models::image::Image;
use std::path::{Path, PathBuf};

/// The longest list of tokens, in bytes.
const LONGEST_TOKENS: u64 = 1 << 26;

/// Sentences for the embedded model; the first is shown at once.
const SENTENCES: &[&str] = &[
    "好久不见",
    "我昨天在图书馆遇到了一个老朋友。",
    "你能告诉我怎么去火车站吗？",
    "她说她明天不来。",
    "如果下雨，我们就待在家里。",
];

pub(super) const COMMAND: Command =
    Command::new("explore", "Explore the attention of a model in the browser", ARGUMENTS, |matches| {
        Ok(Box::new(ExploreArgs::parse(matches)?))
    })
    .examples(EXAMPLES);

impl Run for ExploreArgs {
    /// Serves the page until the program is terminated.
    fn run(&self, print: Print<'_>) -> Result<Status, Failure> {
        // Requests are answered on the server's own threads, so only the global pool applies.
        threads::set_global(self.threads)?;
        let mut settings = Settings::new(self.device.machine()?);
        (settings.address, settings.port) = (self.address, self.port);
        match &self.recording {
            Some(path) => {
                input::check(path)?;
                settings.recording = Some(file::open(path, &self.recording_options()?)?);
                if !self.models.is_empty() || !self.texts.is_empty() {
                    settings.models = models(self)?;
                }
            }
            None => settings.models = models(self)?,
        }
        let named = !self.images.is_empty() || !self.sounds.is_empty();
        settings.examples = match &self.texts[..] {
            _ if named => settings.models.iter().flat_map(|served| served.model.inputs()).map(str::to_owned).collect(),
            [] if self.models.is_empty() => SENTENCES.iter().map(|&text| text.to_owned()).collect(),
            [] => vec![SENTENCES[0].to_owned()],
            texts => texts.to_vec(),
        };
        let server = Server::bind(settings)?;
        let url = server.url();
        print(&format!("{url}\nPress Ctrl-C to stop.\n"))?;
        if server.address().ip().is_unspecified() {
            print("From another machine, replace the address with this machine's name or address.\n")?;
        }
        if !server.address().ip().is_loopback() {
            print("The model is served beyond this machine: anyone with this URL can use it.\n")?;
        }
        if self.open {
            open_browser(&url)?;
        }
        server.run(std::future::pending())?;
        Ok(Status::Done)
    }
}

impl ExploreArgs {
    /// What a recording's file may leave out.
    fn recording_options(&self) -> Result<file::OpenOptions, Failure> {
        let lines = |path: &PathBuf| -> Result<Vec<String>, Failure> {
            Ok(input::read_text(path, LONGEST_TOKENS)?.lines().map(str::to_owned).collect())
        };
        Ok(file::OpenOptions {
            tokens: self.tokens.as_ref().map(lines).transpose()?,
            sequence: self.sequence,
            attention: self.causal.then(|| Attention::scaled_dot().mask(Mask::causal())),
        })
    }
}

/// The models named on the command line, or the embedded one.
fn models(args: &ExploreArgs) -> Result<Vec<ServedModel>, Failure> {
    if args.models.is_empty() {
        let model = embedded::translator(None)?.into();
        let note = "the embedded model, Chinese to English".to_owned();
        return Ok(vec![ServedModel { name: embedded::NAME.to_owned(), note, model }]);
    }
    let served = |path: &PathBuf| {
        input::check(path)?;
        let sounds = files(&args.sounds, |path| Ok(Sound::open(path)?))?;
        let images = files(&args.images, |path| Ok(Image::open(path)?))?;
        let model = Observer::open(path)?.with_images(images)?.with_sounds(sounds)?;
        if model.lacks_sound() {
            return Err(Failure::new(format!("the model in `{}` needs a recording", path.display()))
                .hint("name one with `--audio FILE`"));
        }
        if model.lacks_image() {
            return Err(Failure::new(format!("the model in `{}` takes images", path.display()))
                .hint("name one with `--image FILE`"));
        }
        let note = format!("{}, {}", path.display(), model.note());
        Ok(ServedModel { name: file_name(path), note, model })
    };
    args.models.iter().map(served).collect()
}

/// Opens files, each under its file name, or under its path if that name is taken.
fn files<T>(paths: &[PathBuf], open: impl Fn(&Path) -> qkv_models::Result<T>) -> Result<Vec<(String, T)>, Failure> {
    let mut found: Vec<(String, T)> = Vec::with_capacity(paths.len());
    for path in paths {
        input::check(path)?;
        let short = file_name(path);
        let taken = found.iter().any(|(name, _)| *name == short);
        let name = if taken { path.display().to_string() } else { short };
        // The page shows a name on one line.
        let name = name.split_whitespace().collect::<Vec<_>>().join(" ");
        found.push((name, open(path)?));
    }
    Ok(found)
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}

/// Opens a URL in the default browser.
fn open_browser(url: &str) -> Result<(), Failure> {
    let program = if cfg!(target_os = "macos") {
        "open"
    } else if cfg!(target_os = "windows") {
        "explorer"
    } else {
        "xdg-open"
    };
    let null = std::process::Stdio::null;
    let started = std::process::Command::new(program).arg(url).stdin(null()).stdout(null()).stderr(null()).spawn();
    let failed = |e| Failure::new(format!("cannot start `{program}`: {e}")).hint(format!("open {url} yourself"));
    started.map(drop).map_err(failed)
}
