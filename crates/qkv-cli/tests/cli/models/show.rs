//! `qkv show`: what a model attended to, drawn, printed, measured and as data.

use crate::models::program::{Folder, Ran, json, model};
use serde_json::Value;

fn show(folder: &Folder, words: &str) -> Ran {
    folder.qkv(&format!("show --model {} {words}", model()))
}

fn told(words: &str) -> String {
    show(&Folder::new(), words).quietly()
}

fn object(words: &str) -> Value {
    serde_json::from_str(&told(&format!("--json {words}"))).unwrap()
}

fn rows(object: &Value) -> Vec<Vec<f64>> {
    serde_json::from_value(object["weights"].clone()).unwrap()
}

#[test]
fn a_text_is_translated_and_its_alignment_drawn() {
    let out = told("--tokens abc");
    let lines: Vec<&str> = out.lines().collect();
    let translation = Folder::new().qkv(&format!("translate --model {} abc", model())).quietly();
    assert_eq!(lines[0], format!("abc → {}", translation.trim_end()));
    assert_eq!((lines[1], lines[2]), ("cross.0 · mean of 2 heads · scaled dot", ""));
    assert!(lines[3].trim_start().starts_with("a  b  c"), "{out}");
    assert!(out.contains(['░', '▒', '▓', '█']) && !out.contains('\x1b'), "{out}");
    assert!(lines.last().unwrap().starts_with("░ ") && lines.last().unwrap().contains("  largest 0."), "{out}");
}

#[test]
fn a_text_moves_no_cursor() {
    let out = Folder::new().typed(&["show", "--model", model(), "--target", "\x1b[2Jx", "a\x1b[2Jb\tc"], "").quietly();
    assert!(out.starts_with("a·[2Jb·c → ") && out.chars().all(|c| c == '\n' || !c.is_control()), "{out:?}");
}

#[test]
fn the_alignment_is_that_of_translate() {
    let shown = object("--target xyz ab1");
    let folder = Folder::new();
    let translated = json(&folder.qkv(&format!("translate --model {} --json --align ab1", model())).quietly());
    let own = object("ab1");
    let aligned = &translated[0]["alignment"];
    assert_eq!((&own["rows"], &own["columns"]), (&aligned["target"], &aligned["source"]));
    let theirs: Vec<Vec<f64>> = serde_json::from_value(aligned["weights"].clone()).unwrap();
    for (ours, theirs) in rows(&own).iter().flatten().zip(theirs.iter().flatten()) {
        assert!((ours - theirs).abs() < 1e-6, "{ours} and {theirs}");
    }
    assert_eq!((&own["pharaoh"], &own["output"]), (&aligned["pharaoh"], &translated[0]["translation"]));
    assert_eq!(shown["output"], "xyz");
    let words: Vec<String> = serde_json::from_value(shown["rows"].clone()).unwrap();
    assert_eq!(words.concat(), "xyz");
}

#[test]
fn layers_heads_and_tokens_are_chosen() {
    let causal = object("--layer decoder.0 --head 1 --tokens --special --target xyz abc");
    assert_eq!((&causal["layer"], &causal["head"]), (&"decoder.0".into(), &1.into()));
    assert_eq!(causal["rows"], serde_json::json!(["‹start›", "x", "y", "z"]));
    for (i, row) in rows(&causal).iter().enumerate() {
        let sum: f64 = row.iter().sum();
        assert!((sum - 1.0).abs() < 1e-5, "all tokens are there: {row:?}");
        assert!(row[i + 1..].iter().all(|&weight| weight == 0.0), "none looks ahead: {row:?}");
    }
    let whole = object("--layer decoder.layers.0.self_attn --head 1 --tokens --special --target xyz abc");
    assert_eq!(whole, causal);
    assert_eq!(object("--layer decoder --head 1 --tokens --special --target xyz abc"), causal, "the only one");
    let heads: Vec<Vec<Vec<f64>>> =
        (0..2).map(|head| rows(&object(&format!("--head {head} --target xyz abc")))).collect();
    let mean = rows(&object("--target xyz abc"));
    for (i, row) in mean.iter().enumerate() {
        for (j, weight) in row.iter().enumerate() {
            assert!((weight - (heads[0][i][j] + heads[1][i][j]) / 2.0).abs() < 1e-6);
        }
    }
    assert_eq!(object("--head mean --target xyz abc"), object("--target xyz abc"));
    let encoder = object("--layer encoder.0 --tokens abc");
    assert_eq!(encoder["rows"], serde_json::json!(["a", "b", "c"]), "without its end");
}

#[test]
fn every_file_says_what_its_name_asks_for() {
    let folder = Folder::new();
    let expected = object("abc");
    for end in ["svg", "npy", "safetensors", "json", "csv", "pharaoh", "txt"] {
        assert_eq!(show(&folder, &format!("--out a.{end} abc")).quietly(), "");
    }
    // A character that no font has gives a hint, not a failure.
    assert_eq!(show(&folder, "--out a.png abc").well(), "");
    assert!(folder.text("a.svg").starts_with("<svg ") && folder.text("a.svg").contains(">cross.0 · mean of 2 heads"));
    assert_eq!(folder.bytes("a.png")[..8], *b"\x89PNG\r\n\x1a\n");
    let written: Value = serde_json::from_str(&folder.text("a.json")).unwrap();
    assert_eq!(written, expected);
    let weights: Vec<f32> = rows(&expected).concat().iter().map(|&weight| weight as f32).collect();
    let numbers = |bytes: &[u8]| -> Vec<f32> {
        bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
    };
    assert_eq!(numbers(&folder.bytes("a.npy")[128..]), weights);
    let bytes = folder.bytes("a.safetensors");
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(numbers(file.tensor("weights").unwrap().data()), weights);
    assert_eq!(folder.text("a.csv").lines().count(), rows(&expected).len() + 1);
    assert_eq!(folder.text("a.pharaoh"), format!("{}\n", expected["pharaoh"].as_str().unwrap()));
    assert_eq!(folder.text("a.txt"), folder.text("a.pharaoh"));
}

#[test]
fn pictures_change_with_scale_palette_paper_and_size() {
    let folder = Folder::new();
    show(&folder, "--out a.svg abc").quietly();
    for (at, choice) in
        ["--scale log", "--scale rank", "--palette ember", "--palette grey", "--dark"].iter().enumerate()
    {
        show(&folder, &format!("--out {at}.svg {choice} abc")).quietly();
        assert_ne!(folder.text(&format!("{at}.svg")), folder.text("a.svg"), "{choice}");
    }
    let width = |name: &str| u32::from_be_bytes(folder.bytes(name)[16..20].try_into().unwrap());
    show(&folder, "--out two.png abc").well();
    show(&folder, "--out four.png --magnify 4 abc").well();
    assert_eq!(width("four.png"), 2 * width("two.png"));
    show(&folder, "--out a.png --magnify 1e6 abc")
        .fails(&["pixels is too large or too small", "hint: magnify it by at most "]);
    assert!(!folder.has("a.png"));
}

#[test]
fn heads_are_measured() {
    let out = told("--heads abcab");
    let lines: Vec<Vec<&str>> = out.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[0][..4], ["layer", "head", "entropy", "first"]);
    assert_eq!(lines[1][..2], ["encoder.0", "0"]);
    assert_eq!(lines[6][..2], ["cross.0", "1"]);
    assert_eq!(lines[6][4..8], ["–"; 4], "from one side to another nothing is itself: {out}");
    let widths: Vec<usize> = out.lines().take(7).map(|line| line.chars().count()).collect();
    assert!(widths.iter().all(|&width| width == widths[0]), "{out}");
    let heads = object("--heads abcab");
    let heads = heads["heads"].as_array().unwrap();
    assert_eq!(heads.len(), 6);
    for head in heads {
        assert!(head["entropy"].as_f64().unwrap() > 0.0 && head["importance"].as_f64().unwrap() > 0.0, "{head}");
    }
    assert!(heads[0]["itself"].is_f64() && heads[5]["itself"].is_null());
}

#[test]
fn layers_are_listed_with_and_without_a_text() {
    let out = told("--list");
    assert_eq!(out.lines().count(), 4);
    assert!(out.contains("decoder.0  decoder.layers.0.self_attn"), "{out}");
    assert!(out.contains("scaled dot · causal") && !out.contains('×'), "{out}");
    assert!(told("--list abc").contains("4 × 4"));
    let layers = object("--list abc");
    assert_eq!(layers["layers"][2]["layer"], "cross.0");
    assert_eq!(layers["layers"][0]["size"], serde_json::json!([4, 4]));
    assert!(object("--list")["layers"][0]["size"].is_null());
}

#[test]
fn lines_of_stdin_are_drawn_one_after_the_other() {
    let folder = Folder::new();
    let typed = format!("show --model {}", model());
    let both = folder.qkv_on(&typed, "abc\n\n xy\n").quietly();
    assert_eq!(both, format!("{}\n{}", told("abc"), told("xy")));
    assert_eq!(json(&folder.qkv_on(&format!("{typed} --json"), "abc\nxy\n").quietly()).len(), 2);
    folder.qkv_on(&format!("{typed} --out a.svg"), "abc\n\n").quietly();
    assert!(folder.has("a.svg"));
    folder.qkv_on(&format!("{typed} --out b.svg"), "abc\nxy\n").fails(&["stdin has 2 lines", "hint: give one line"]);
    folder.qkv_on(&typed, "\n").fails(&["there is no text to show", "hint: give a sentence"]);
    assert!(!folder.has("b.svg"));
}

#[test]
fn what_is_not_there_is_named() {
    let folder = Folder::new();
    let fails = |words: &str, said: &[&str]| show(&folder, words).fails(said);
    fails(
        "--layer middle.0 abc",
        &["there is no layer `middle.0`", "hint: the layers are encoder.0, decoder.0, cross.0"],
    );
    fails("--layer encoder.1 abc", &["there is no layer `encoder.1`"]);
    fails("--head 2 abc", &["`cross.0` has no head 2", "hint: its heads are 0 to 1, or `mean`"]);
    fails("--out a.gif abc", &["`a.gif`: unknown extension", "hint: known extensions are `.svg`"]);
    fails("--out none/a.svg abc", &["`none/a.svg`: cannot be written: there is no folder `none`"]);
    fails(&"a".repeat(60), &["the model takes at most"]);
    folder.typed(&["show", "--model", model(), "--target", "", "abc"], "").fails(&["no words to draw", "`--special`"]);
    folder.qkv("show --model none abc").fails(&["`none` does not exist", "hint: a model is a folder with"]);
}

#[test]
fn misuse_is_told_as_misuse() {
    let folder = Folder::new();
    let misused = |words: &str, said: &[&str]| folder.qkv(&format!("show --model m {words}")).misused(said);
    misused("--head first a", &["`--head first`", "a number from 0, or `mean`"]);
    misused("--head=-1 a", &["`--head -1`"]);
    misused("--scale cubic a", &["--scale", "linear, log, rank"]);
    misused("--palette rainbow a", &["sea, ember, grey"]);
    misused("--dark a", &["`--dark` requires `--out`"]);
    misused("--heads --out a.svg a", &["`--out` cannot be used with `--heads`"]);
    misused("--list --heads a", &["cannot be used with"]);
    misused("a b", &["unexpected argument 'b'"]);
}

#[test]
fn a_recording_is_drawn_as_the_text_that_it_was_made_from() {
    let folder = Folder::new();
    show(&folder, "--out run.qkv.safetensors abc").quietly();
    for choices in ["", "--layer decoder.0 --head 1 --tokens --special", "--json"] {
        let again = folder.qkv(&format!("show --recording run.qkv.safetensors {choices}")).quietly();
        assert_eq!(again, show(&folder, &format!("{choices} abc")).quietly());
    }
    folder.qkv("show --recording run.qkv.safetensors --heads").quietly();
    folder.qkv("show --recording none.safetensors").fails(&["cannot open `none.safetensors`"]);
    folder.qkv("show --recording run.qkv.safetensors abc").misused(&["--recording"]);
}

#[test]
fn a_page_stands_alone_in_one_file() {
    let folder = Folder::new();
    show(&folder, "--out page.html abc").quietly();
    let page = std::fs::read_to_string(folder.path().join("page.html")).unwrap();
    assert!(page.starts_with("<!doctype html>") && page.contains("\"standalone\":true"));
    assert!(!page.contains("src=\"/") && !page.contains("<!--qkv:"));
}

#[test]
fn links_of_someone_else_are_compared() {
    let own = object("abc")["pharaoh"].as_str().unwrap().to_owned();
    let folder = Folder::new();
    let typed = ["show", "--model", model(), "--links", &own, "abc"];
    let out = folder.typed(&typed, "").quietly();
    assert!(out.ends_with("\nagreement  precision 1.000 · recall 1.000 · error rate 0.000\n"), "{out}");
    let other = folder.typed(&["show", "--model", model(), "--json", "--links", "90-90", "abc"], "").quietly();
    let other: Value = serde_json::from_str(&other).unwrap();
    assert_eq!((&other["agreement"]["precision"], &other["agreement"]["error_rate"]), (&0.0.into(), &1.0.into()));
    folder.typed(&["show", "--model", model(), "--links", "0:0", "abc"], "").misused(&["`0:0` is not a link"]);
}

#[test]
fn a_document_is_shown_with_its_words_shaded() {
    let (folder, _) = crate::models::documents::trained();
    let text = "'we saw it at night . <s> it was lovely to see <s> it has two parts !'";
    let show = |words: &str| {
        folder.typed(
            &["show", "--model", "m", "--threads", "1"]
                .iter()
                .copied()
                .chain(words.split(' ').filter(|word| !word.is_empty()))
                .chain([text])
                .collect::<Vec<_>>(),
            "",
        )
    };
    let out = show("").quietly();
    assert!(out.starts_with("good 0.9") && out.contains("lovely") && out.contains('█'), "{out}");
    show("--out a.svg").quietly();
    let svg = folder.text("a.svg");
    assert!(svg.contains(">lovely</text>") && svg.contains("<title>good 0."), "{svg}");
    show("--out a.png").well();
    assert!(folder.bytes("a.png").starts_with(b"\x89PNG"));
    let told = &json(&show("--json").quietly())[0];
    let sentences = told["sentences"].as_array().unwrap();
    let sum = |of: &[Value]| of.iter().map(|part| part["weight"].as_f64().unwrap()).sum::<f64>();
    assert_eq!(sentences.len(), 3);
    assert!((sum(sentences) - 1.0).abs() < 1e-4 && (sum(sentences[1]["words"].as_array().unwrap()) - 1.0).abs() < 1e-4);
    let classified = json(&folder.typed(&["classify", "--model", "m", "--json", "--weights", text], "").quietly());
    assert_eq!(classified[0]["sentences"][1]["words"][2]["text"], sentences[1]["words"][2]["text"]);
    // One level as a matrix, and the layers by their names.
    assert!(show("--list").quietly().contains("words.attention"));
    assert!(show("--layer words --tokens").quietly().contains("words.0 · one head · additive"));
}

#[test]
fn an_image_is_shown_under_the_weights_of_its_patches() {
    let (folder, _) = crate::models::images::trained();
    let out = folder.qkv("show --model m --image right.png").quietly();
    assert!(out.starts_with("right.png → right ") && out.contains("rollout") && out.contains('█'), "{out}");
    folder.qkv("show --model m --image right.png --layer encoder.0 --head 1 --out a.svg").quietly();
    assert!(folder.text("a.svg").contains("encoder.0 · head 1</text>"));
    let told = &json(&folder.qkv("show --model m --image right.png --json").quietly())[0];
    let sum: f64 = told["patches"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|row| row.as_array().unwrap())
        .map(|x| x.as_f64().unwrap())
        .sum();
    assert!((sum - 1.0).abs() < 1e-4, "{told}");
    assert!(folder.qkv("show --model m --image right.png --tokens").quietly().contains("encoder.0 · mean of 2 heads"));
    folder.qkv("show --model m abc").fails(&["takes images", "hint: name one with `--image FILE`"]);
    folder.qkv("show --model m --image right.png --layer encoder.0 --head 7").fails(&["no head 7", "heads are 0 to 1"]);
    folder.qkv(&format!("show --model {} --image right.png", model())).fails(&["takes text, not images"]);
}
