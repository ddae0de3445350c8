//! `cargo xtask cycles`: fails if more than three files of a crate depend on one another in a cycle. Dependencies
//! between a file and the files in its folder do not count: a parent re-exports its children, and they may use what it
//! owns.

use crate::files;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;

/// Number of files in the largest permitted cycle.
const FILES: usize = 3;

/// A module, by its path within the crate.
type Module = Vec<String>;

/// Prints the files of each cycle; the error says how many cycles there are.
pub fn check() -> Result<(), String> {
    let mut crates: BTreeMap<String, Sources> = BTreeMap::new();
    for path in files::tracked(&["rs"])? {
        let Some((name, file)) = path.strip_prefix("crates/").and_then(|path| path.split_once("/src/")) else {
            continue;
        };
        let Ok(text) = fs::read_to_string(&path) else { continue };
        crates.entry(name.into()).or_default().add(file, &text);
    }
    let mut found = 0;
    for (name, sources) in &crates {
        for circle in circles(&sources.edges()).iter().filter(|circle| circle.len() > FILES) {
            let names: Vec<String> = circle.iter().map(|module| module.join("/")).collect();
            println!("{name}: {}", names.join(", "));
            found += 1;
        }
    }
    match found {
        0 => Ok(()),
        _ => Err(format!("error: {found} circles of more than {FILES} files that use one another")),
    }
}

/// The paths that each module of a crate refers to.
#[derive(Default)]
struct Sources {
    /// Paths in `use` items; the last part is the imported name.
    imports: BTreeMap<Module, Vec<Module>>,
    /// Paths in `use` items or in the code itself.
    named: BTreeMap<Module, Vec<Module>>,
}

impl Sources {
    /// Adds a file, by its path within `src`.
    fn add(&mut self, file: &str, text: &str) {
        let mut module: Module = file.trim_end_matches(".rs").split('/').map(str::to_owned).collect();
        if module.last().is_some_and(|last| last == "mod") || ["lib.rs", "main.rs"].contains(&file) {
            module.pop();
        }
        let code = code(text);
        let imports: Vec<Module> = uses(&code);
        let named = imports.iter().cloned().chain(in_place(&code)).collect();
        self.imports.insert(module.clone(), imports);
        self.named.insert(module, named);
    }

    /// Which modules use which, except between parents and children in a folder.
    fn edges(&self) -> BTreeMap<&Module, BTreeSet<&Module>> {
        let edges = self.named.iter().map(|(from, paths)| {
            let to = paths.iter().filter_map(|path| self.owner(from, path, 0));
            (from, to.filter(|to| !to.starts_with(from) && !from.starts_with(to)).collect())
        });
        edges.collect()
    }

    /// The module that owns the item to which a path refers in `from`, following re-exports.
    fn owner(&self, from: &Module, path: &[String], depth: usize) -> Option<&Module> {
        let ups = path.iter().take_while(|part| *part == "super").count();
        let (mut at, mut rest): (Module, &[String]) = match path.first().map(String::as_str) {
            Some("crate") => (Vec::new(), &path[1..]),
            Some("super") => (from[..from.len().checked_sub(ups)?].to_vec(), &path[ups..]),
            Some("self") => (from.clone(), &path[1..]),
            _ => (from.clone(), path),
        };
        let start = at.len();
        while let Some((part, after)) = rest.split_first() {
            at.push(part.clone());
            if !self.named.contains_key(&at) {
                at.pop();
                break;
            }
            rest = after;
        }
        let relative = !path.first().is_some_and(|first| ["crate", "super", "self"].contains(&first.as_str()));
        if relative && at.len() == start {
            return None; // another crate
        }
        if let (Some(name), true) = (rest.first(), depth < 8) {
            let exports = self.imports.get(&at).into_iter().flatten().filter(|path| path.last() == Some(name));
            if let Some(owner) = exports.filter_map(|path| self.owner(&at, path, depth + 1)).next() {
                return Some(owner);
            }
        }
        self.named.get_key_value(&at).map(|(module, _)| module)
    }
}

/// The code of a file without comments and tests.
fn code(text: &str) -> String {
    let text = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
    text.lines().map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n")
}

/// The paths of all `use` items, with groups expanded.
fn uses(code: &str) -> Vec<Module> {
    let items = code.split(';').filter_map(|item| {
        let at = item.rfind("use ").filter(|&at| at == 0 || item[..at].ends_with(char::is_whitespace))?;
        Some(item[at + 4..].trim().to_owned())
    });
    let mut paths = Vec::new();
    items.for_each(|item| expand(&item, &mut Vec::new(), &mut paths));
    paths
}

/// Expands `a::{b, c::d as e}` into `a::b` and `a::c::d`.
fn expand(item: &str, before: &mut Module, paths: &mut Vec<Module>) {
    let (path, group) = item.split_once('{').map_or((item, None), |(path, group)| (path, Some(group)));
    let path = path.split(" as ").next().unwrap_or_default();
    let depth = before.len();
    before.extend(path.split("::").map(str::trim).filter(|part| !part.is_empty()).map(str::to_owned));
    match group.and_then(|group| group.rsplit_once('}')) {
        None => paths.push(before.clone()),
        Some((group, _)) => {
            let (mut level, mut start) = (0, 0);
            for (at, letter) in group.char_indices().chain([(group.len(), ',')]) {
                match letter {
                    '{' => level += 1,
                    '}' => level -= 1,
                    ',' if level == 0 => {
                        let item = group[start..at].trim();
                        if !item.is_empty() {
                            expand(item, before, paths);
                        }
                        start = at + 1;
                    }
                    _ => {}
                }
            }
        }
    }
    before.truncate(depth);
}

/// Paths starting with `crate::` or `super::` in the code itself.
fn in_place(code: &str) -> Vec<Module> {
    let word = |letter: char| letter.is_alphanumeric() || letter == '_' || letter == ':';
    let paths = code
        .split(|letter: char| !word(letter))
        .filter(|path| path.starts_with("crate::") || path.starts_with("super::"));
    paths.map(|path| path.split("::").filter(|part| !part.is_empty()).map(str::to_owned).collect()).collect()
}

/// The strongly connected components of more than one module (Tarjan 1972).
fn circles<'a>(edges: &BTreeMap<&'a Module, BTreeSet<&'a Module>>) -> Vec<Vec<&'a Module>> {
    let mut search =
        Search { edges, order: BTreeMap::new(), low: BTreeMap::new(), stack: Vec::new(), found: Vec::new() };
    for &module in edges.keys() {
        if !search.order.contains_key(module) {
            search.visit(module);
        }
    }
    search.found
}

struct Search<'e, 'a> {
    edges: &'e BTreeMap<&'a Module, BTreeSet<&'a Module>>,
    order: BTreeMap<&'a Module, usize>,
    low: BTreeMap<&'a Module, usize>,
    stack: Vec<&'a Module>,
    found: Vec<Vec<&'a Module>>,
}

impl<'a> Search<'_, 'a> {
    fn visit(&mut self, module: &'a Module) {
        let number = self.order.len();
        self.order.insert(module, number);
        self.low.insert(module, number);
        self.stack.push(module);
        for &next in &self.edges[module] {
            let reached = match self.order.get(next) {
                None => {
                    self.visit(next);
                    self.low[next]
                }
                Some(&order) if self.stack.contains(&next) => order,
                Some(_) => continue,
            };
            let low = self.low[module].min(reached);
            self.low.insert(module, low);
        }
        if self.low[module] == number {
            let at = self.stack.iter().position(|&other| other == module).unwrap_or_default();
            let circle = self.stack.split_off(at);
            if circle.len() > 1 {
                self.found.push(circle);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sources(files: &[(&str, &str)]) -> Sources {
        let mut sources = Sources::default();
        files.iter().for_each(|(file, text)| sources.add(file, text));
        sources
    }

    #[test]
    fn a_circle_is_found_through_groups_and_exports() {
        let sources = sources(&[
            ("lib.rs", "mod a;\nmod b;\nmod c;\npub use c::Thing;"),
            ("a.rs", "use crate::{b::{self, Other as Name}, std};\n"),
            ("b.rs", "fn f() -> crate::Thing {}\n"),
            ("c.rs", "use super::a; // use super::d;\n"),
            ("d.rs", "use crate::a;\n"),
        ]);
        let edges = sources.edges();
        let circle: Vec<String> = circles(&edges)[0].iter().map(|module| module.join("/")).collect();
        assert_eq!(circles(&edges).len(), 1);
        assert_eq!(BTreeSet::from_iter(circle), ["a", "b", "c"].map(String::from).into());
    }

    #[test]
    fn a_folder_is_one_room_and_tests_do_not_count() {
        let sources = sources(&[
            ("a/mod.rs", "mod b;\nuse b::X;\n#[cfg(test)]\nmod tests { use crate::c; }"),
            ("a/b.rs", "use super::Y;\nuse crate::c::Z;"),
            ("c.rs", "pub struct Z;"),
        ]);
        assert!(circles(&sources.edges()).is_empty());
    }
}
