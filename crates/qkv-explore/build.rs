//! Lists the files of the page, to embed them in the program.

use std::fmt::Write as _;
use std::path::Path;

fn main() {
    let folder = Path::new(&std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("page");
    println!("cargo:rerun-if-changed={}", folder.display());
    let entries = std::fs::read_dir(&folder).expect("the page's folder");
    let mut names: Vec<String> = entries
        .map(|entry| entry.expect("an entry").file_name().into_string().expect("a plain name"))
        .filter(|name| [".html", ".css", ".js", ".svg"].iter().any(|end| name.ends_with(end)))
        .collect();
    names.sort();
    let mut code = String::from("/// The page's files.\nconst FILES: &[(&str, &str)] = &[\n");
    for name in names {
        let path = folder.join(&name);
        writeln!(code, "    ({name:?}, include_str!({:?})),", path.display().to_string()).expect("memory");
    }
    code.push_str("];\n");
    let out = Path::new(&std::env::var("OUT_DIR").expect("cargo sets it")).join("page.rs");
    std::fs::write(out, code).expect("cargo's folder takes files");
}
