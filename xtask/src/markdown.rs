//! Checks of the repository's Markdown pages, run as tests: relative links resolve, and pages in English and Chinese
//! have the same sections and the same code. The code itself runs as doc tests of `qkv`.
//!
//! A Chinese heading carries the anchor of its English counterpart, `## <a id="two-commands"></a>两条命令`: links are then
//! the same in both languages, and a missing heading can be named.

use std::fs;
use std::path::{Path, PathBuf};

/// The parts of a page that the tests compare.
struct Page {
    path: PathBuf,
    headings: Vec<Heading>,
    /// Targets of links, images and link definitions, as written.
    links: Vec<String>,
    /// Rust code blocks, without comments.
    code: Vec<Vec<String>>,
}

#[derive(Debug, PartialEq, Eq)]
struct Heading {
    level: usize,
    /// The `id` of an `<a>` in the heading, or the anchor that GitHub and rustdoc derive from its text.
    anchor: String,
}

impl Page {
    fn read(path: &Path) -> Self {
        let text = fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let mut page = Self { path: path.to_owned(), headings: Vec::new(), links: Vec::new(), code: Vec::new() };
        let mut fence: Option<bool> = None; // inside a code block: whether it is Rust
        for line in text.lines() {
            if let Some(info) = line.trim_start().strip_prefix("```") {
                fence = match fence {
                    Some(_) => None,
                    None => Some(info.starts_with("rust")),
                };
                if fence == Some(true) {
                    page.code.push(Vec::new());
                }
            } else if let Some(rust) = fence {
                if rust && let Some(code) = without_comment(line) {
                    page.code.last_mut().expect("a block was opened").push(code);
                }
            } else {
                page.text(line);
            }
        }
        page
    }

    fn text(&mut self, line: &str) {
        let level = line.bytes().take_while(|&byte| byte == b'#').count();
        if level > 0 && line[level..].starts_with(' ') {
            let text = line[level..].trim();
            let anchor = text.split_once("<a id=\"").and_then(|(_, rest)| rest.split('"').next());
            let anchor = anchor.map_or_else(|| anchor_of(text), str::to_owned);
            self.headings.push(Heading { level, anchor });
        }
        let prose: String = line.split('`').step_by(2).collect(); // the text outside inline code
        let targets = prose.split("](").skip(1).filter_map(|rest| rest.split([')', ' ']).next());
        self.links.extend(targets.map(str::to_owned));
        if prose.starts_with('[')
            && let Some((_, target)) = prose.split_once("]: ")
            && !target.trim().contains(' ')
        {
            self.links.push(target.trim().to_owned());
        }
    }
}

/// The anchor that GitHub gives to a heading: lower case, punctuation and symbols dropped, spaces as hyphens.
fn anchor_of(heading: &str) -> String {
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.flat_map(char::to_lowercase).map(|c| if c == ' ' { '-' } else { c }).collect()
}

/// A line of code without its comment; `None` if nothing is left.
fn without_comment(line: &str) -> Option<String> {
    let code = line.split("//").next().unwrap_or_default().trim_end();
    (!code.trim().is_empty()).then(|| code.to_owned())
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask is in the root").to_owned()
}

/// Folders without pages: build outputs, data, and parts from which a program assembles pages.
const SKIPPED: [&str; 7] = ["target", "node_modules", "runs", "data", "venv", "shared", "figures"];

/// All Markdown pages of the repository.
fn pages(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder of the repository").flatten() {
        let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) && !name.starts_with('.') && !SKIPPED.contains(&&*name) {
            pages(&path, found);
        } else if name.ends_with(".md") && !path.is_symlink() {
            found.push(path);
        }
    }
}

/// Pages in two languages: the READMEs and the guide.
fn translations() -> Vec<(PathBuf, PathBuf)> {
    let root = root();
    let guide = fs::read_dir(root.join("docs/guide")).expect("the guide").flatten().map(|entry| entry.path());
    let english = guide.filter(|path| path.extension().is_some_and(|end| end == "md"));
    english
        .filter(|path| !path.to_string_lossy().ends_with(".zh-CN.md"))
        .chain([root.join("README.md")])
        .map(|path| (path.clone(), path.with_extension("zh-CN.md")))
        .collect()
}

#[test]
fn every_relative_link_leads_somewhere() {
    let (root, mut paths) = (root(), Vec::new());
    pages(&root, &mut paths);
    assert!(paths.len() > 30, "{} pages found", paths.len());
    let mut broken = Vec::new();
    for page in paths.iter().map(|path| Page::read(path)) {
        for link in &page.links {
            if link.contains("://") || link.starts_with("mailto:") || link.is_empty() {
                continue;
            }
            let (file, anchor) = link.split_once('#').map_or((&**link, None), |(file, anchor)| (file, Some(anchor)));
            let folder = page.path.parent().expect("a file is in a folder");
            let target = if file.is_empty() { page.path.clone() } else { folder.join(file) };
            let has = |anchor| Page::read(&target).headings.iter().any(|heading| heading.anchor == anchor);
            let is_page = target.extension().is_some_and(|end| end == "md");
            if !target.exists() || is_page && anchor.is_some_and(|anchor| !has(anchor)) {
                broken.push(format!("{}: {link}", page.path.strip_prefix(&root).unwrap_or(&page.path).display()));
            }
        }
    }
    assert!(broken.is_empty(), "broken links:\n{}", broken.join("\n"));
}

#[test]
fn both_languages_have_the_same_headings() {
    for (english, chinese) in translations() {
        let [english, chinese] = [english, chinese].map(|path| Page::read(&path));
        let only = |here: &Page, there: &Page| -> Vec<String> {
            let missing = here.headings.iter().filter(|heading| !there.headings.contains(heading));
            missing.map(|heading| format!("{} #{}", "#".repeat(heading.level), heading.anchor)).collect()
        };
        let (ours, theirs) = (only(&english, &chinese), only(&chinese, &english));
        let path = chinese.path.display();
        assert!(ours.is_empty() && theirs.is_empty(), "{path}: only in English {ours:?}, only in Chinese {theirs:?}");
        assert_eq!(english.headings, chinese.headings, "{path}: another order");
    }
}

#[test]
fn both_languages_have_the_same_code() {
    for (english, chinese) in translations() {
        let [english, chinese] = [english, chinese].map(|path| Page::read(&path));
        assert_eq!(english.code.len(), chinese.code.len(), "code blocks of {}", chinese.path.display());
        for (number, (ours, theirs)) in english.code.iter().zip(&chinese.code).enumerate() {
            assert_eq!(ours, theirs, "code block {} of {}", number + 1, chinese.path.display());
        }
    }
}

#[test]
fn both_languages_link_to_each_other() {
    for (english, chinese) in translations() {
        let name = |path: &Path| path.file_name().expect("a file").to_string_lossy().into_owned();
        for (page, other) in [(&english, &chinese), (&chinese, &english)] {
            let text = fs::read_to_string(page).expect("both pages are there");
            let top = text.lines().nth(2).unwrap_or_default();
            assert!(top.contains("English") && top.contains("中文"), "the top of {}: {top}", page.display());
            assert!(Page::read(page).links.contains(&name(other)), "{} does not link to the other", page.display());
        }
    }
}

#[test]
fn anchors_are_those_of_github() {
    assert_eq!(anchor_of("Why √d"), "why-d");
    assert_eq!(anchor_of("`qkv embed`: vectors"), "qkv-embed-vectors");
    assert_eq!(anchor_of("The key/value cache"), "the-keyvalue-cache");
    assert_eq!(anchor_of("scaled_dot_product_attention"), "scaled_dot_product_attention");
}
