//! `qkv bench` as a user types it, on tiny shapes for tiny times. No test asserts a speed.

use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::LazyLock;

const FIELDS: [&str; 13] =
    ["b", "hq", "hk", "n", "m", "d", "dtype", "causal", "direction", "best_ms", "median_ms", "gflops", "peak_share"];

/// Programs that pretend to be a Python. They are all written before the first command starts, because a file that is
/// open for writing in a process that is just being started cannot be run.
static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("bench");
    fs::create_dir_all(&folder).unwrap();
    let ready = r#"echo '{"ready": true, "version": "9.9"}'"#;
    let fake = |name: &str, script: &str| {
        let path = folder.join(name);
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        #[cfg(unix)]
        fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    };
    let answers = r#"case "$line" in
  *'"do":"prepare"'*) echo '{"done": true}';;
  *'"do":"measure"'*) echo '{"best_ms": 5000, "median_ms": 6000}';;
  *'"do":"memory"'*) echo '{"beyond_bytes": 1048576}';;
esac"#;
    fake("right", &format!("{ready}\nwhile read line; do echo \"$3 $line\" >> \"$QKV_TEST_LOG\"\n{answers}\ndone"));
    fake("dies", &format!("{ready}\nread line\necho 'Killed by a test' >&2\nexit 3"));
    fake("dies-at-once", "exit 0");
    fake("babbles", "echo 'Welcome to Python'");
    fake("babbles-later", &format!("{ready}\nwhile read line; do echo '{{\"best_ms\": -1}}'; done"));
    fake("fails", &format!("{ready}\nread line\necho '{{\"error\": \"RuntimeError: no such thing\"}}'"));
    fake("no-torch", r#"echo '{"error": "ModuleNotFoundError: No module named torch", "missing": true}'; exit 1"#);
    folder
});

struct Ran {
    code: Option<i32>,
    out: String,
    err: String,
}

fn qkv(words: &str) -> Ran {
    let folder = &*FOLDER;
    let mut command = Command::new(env!("CARGO_BIN_EXE_qkv"));
    command.args(words.split_whitespace()).current_dir(folder).stdin(Stdio::null());
    command.env("QKV_TEST_LOG", folder.join(log(words)));
    let ran = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    Ran { code: ran.status.code(), out: text(ran.stdout), err: text(ran.stderr) }
}

/// A log file per command, to which the fake Python `right` appends each request.
fn log(words: &str) -> String {
    let safe: String = words.chars().filter(char::is_ascii_alphanumeric).collect();
    format!("{safe}.log")
}

/// Runs a command that succeeds with nothing on stderr.
fn well(words: &str) -> String {
    let ran = qkv(&format!("bench --seconds 0.001 {words}"));
    assert_eq!((ran.code, &ran.err[..]), (Some(0), ""), "{}", ran.out);
    ran.out
}

fn refused(words: &str, code: i32, said: &[&str]) {
    let ran = qkv(&format!("bench --seconds 0.001 {words}"));
    assert_eq!(ran.code, Some(code), "{}{}", ran.out, ran.err);
    assert!(ran.err.starts_with("error: "), "{}", ran.err);
    for said in said {
        assert!(ran.err.contains(said), "no {said:?} in: {}", ran.err);
    }
}

fn rows(out: &str) -> Vec<Value> {
    out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn json_is_one_object_a_line_with_the_fields_in_their_order() {
    let out = well("--json --shape 2,4,2,20,30,8 --dtype f64 --causal --direction backward --threads 1");
    let [row] = &rows(&out)[..] else { panic!("one line: {out}") };
    let about = [("b", 2), ("hq", 4), ("hk", 2), ("n", 20), ("m", 30), ("d", 8)];
    assert!(about.iter().all(|(name, value)| row[name] == *value), "{row}");
    assert_eq!((&row["dtype"], &row["direction"]), (&"f64".into(), &"backward".into()));
    assert_eq!(row["causal"], true);
    let number = |name: &str| row[name].as_f64().unwrap();
    assert!(number("best_ms") > 0.0 && number("median_ms") >= number("best_ms"));
    assert!(number("gflops") > 0.0 && number("peak_share") > 0.0);
    let places: Vec<usize> = FIELDS.iter().map(|field| out.find(&format!("\"{field}\":")).unwrap()).collect();
    assert!(places.is_sorted(), "{out}");
    assert_eq!(row.as_object().unwrap().len(), FIELDS.len(), "{row}");
}

#[test]
fn gflops_are_the_work_over_the_best_time() {
    let out = well("--json --shape 1,2,2,64,64,16 --dtype f32");
    let row = &rows(&out)[0];
    let expected = 4.0 * 2.0 * 64.0 * 64.0 * 16.0 / row["best_ms"].as_f64().unwrap() / 1e6;
    assert!((row["gflops"].as_f64().unwrap() / expected - 1.0).abs() < 0.01, "{row}");
    assert!(row["formula_ms"].as_f64().unwrap() > 0.0, "f32 forward has the formula beside it");
}

#[test]
fn every_shape_type_and_direction_has_its_row() {
    let shapes = "--shape 1,1,1,8,8,4 --shape 1,4,2,2,16,5";
    let types = "--dtype f32 --dtype bf16 --dtype f16 --dtype bf16";
    let out = well(&format!("--json {shapes} {types} --direction forward --direction backward --direction decode"));
    let rows = rows(&out);
    assert_eq!(rows.len(), 2 * 3 * 3, "a type that is given twice is measured once");
    for row in rows {
        assert_eq!(row["gbs"].is_number(), row["direction"] == "decode", "{row}");
    }
}

#[test]
fn speed_up_is_told_for_every_number_of_threads_and_plotted() {
    let out = well("--scaling scaling.svg --json --threads 3 --shape 1,2,2,40,40,16 --shape 1,1,1,8,8,4");
    let rows = rows(&out);
    let threads: Vec<u64> = rows.iter().map(|row| row["threads"].as_u64().unwrap()).collect();
    assert_eq!(threads, [1, 2, 3, 1, 2, 3]);
    for row in &rows {
        assert!(row["speed_up"].as_f64().unwrap() > 0.0 && row["of_copies"].as_f64().unwrap() > 0.0, "{row}");
    }
    assert_eq!(rows[0]["speed_up"], 1.0);
    let svg = fs::read_to_string(FOLDER.join("scaling.svg")).unwrap();
    assert!(svg.starts_with("<svg") && svg.contains("threads") && svg.contains("1,2,2,40,40,16"), "{svg}");
    let table = well("--scaling scaling.svg --threads 1 --shape 1,1,1,8,8,4");
    assert!(table.contains("of copies") && table.contains("On 1 thread:"), "{table}");
    refused("--scaling a.svg --train", 2, &["--train"]);
    refused("--scaling none/a.svg --shape 1,1,1,8,8,4", 1, &["none"]);
}

#[test]
fn the_table_is_aligned() {
    let out = well("--shape 1,1,1,8,8,4 --shape 1,2,1,100,100,32 --direction forward --direction decode");
    let mut lines = out.lines();
    assert!(lines.next().unwrap().starts_with("qkv "));
    assert_eq!(lines.next(), Some(""));
    let head = lines.next().unwrap();
    for title in ["b,hq,hk,n,m,d", "type", "mask", "direction", "best ms", "GFLOP/s", "of peak", "GB/s", "formula ms"] {
        assert!(head.contains(title), "{head}");
    }
    let rows: Vec<&str> = lines.collect();
    assert_eq!(rows.len(), 4);
    for row in rows {
        assert_eq!(row.chars().count(), head.chars().count(), "{row}");
    }
}

#[test]
fn markdown_is_a_table_in_markdown() {
    let out = well("--markdown --shape 1,1,1,8,8,4 --causal");
    assert!(out.contains("\n| --- | --- | --- | --- | ---: |"), "{out}");
    assert!(out.contains("\n| 1,1,1,8,8,4 | f32 | causal | forward | "), "{out}");
}

#[test]
fn misuse_is_told_with_the_choice() {
    refused("--shape 1,2,3", 2, &["--shape", "six whole numbers of at least 1, `B,Hq,Hk,N,M,D`"]);
    refused("--shape 1,1,1,0,8,8", 2, &["--shape", "at least 1"]);
    refused("--shape 1,3,2,8,8,8", 2, &["Hq must be a multiple of Hk, and 3 is not a multiple of 2"]);
    refused("--shape 1,1,1,8,8,-8", 2, &["--shape"]);
    refused("--dtype f8", 2, &["--dtype", "f32, f64, bf16, f16"]);
    refused("--direction sideways", 2, &["--direction", "forward, backward, decode"]);
    refused("--threads 0", 2, &["--threads"]);
    refused("--against candle", 2, &["--against", "torch"]);
    refused("--against torch --rounds 4", 2, &["--rounds"]);
    refused("--rounds 7", 2, &["`--rounds` requires `--against`"]);
    refused("--python python3", 2, &["`--python` requires `--against`"]);
    refused("--json --markdown", 2, &["`--json` cannot be used with `--markdown`"]);
    refused("--longest 1024", 2, &["`--longest` requires `--lengths`"]);
    refused("--lengths plot.svg --causal", 2, &["`--lengths` cannot be used with `--causal`"]);
    let ran = qkv("bench --seconds 0");
    assert!(ran.code == Some(2) && ran.err.contains("--seconds"), "{}", ran.err);
}

#[test]
fn a_shape_without_room_or_meaning_is_refused_before_anything_is_measured() {
    let small = "--json --shape 1,1,1,8,8,8";
    let ran = qkv(&format!("bench {small} --shape 9999,9999,9999,99999,99999,128"));
    assert_eq!((ran.code, &ran.out[..]), (Some(1), ""));
    assert!(ran.err.contains("GiB of memory, and this machine has"), "{}", ran.err);
    refused("--shape 18446744073709551615,1,1,18446744073709551615,8,8", 1, &["GiB of memory"]);
    refused("--direction decode --shape 1,1,1,9,8,8", 1, &["9 queries cannot be at the end of 8 keys"]);
}

#[cfg(unix)]
#[test]
fn an_anchor_is_asked_in_rounds_and_its_ratios_are_told() {
    let words =
        "bench --seconds 0.001 --json --shape 1,4,2,8,8,4 --causal --threads 2 --against torch --python ./right";
    let _ = fs::remove_file(FOLDER.join(log(words)));
    let ran = qkv(words);
    assert_eq!((ran.code, &ran.err[..]), (Some(0), ""));
    let row = &rows(&ran.out)[0];
    assert_eq!((row["torch_ms"].as_f64(), row["torch_median_ms"].as_f64()), (Some(5000.0), Some(6000.0)));
    // One round has our best call of all; in the others our best is slower, and the ratio lower.
    let (ratio, best) = (row["ratio"].as_f64().unwrap(), row["best_ms"].as_f64().unwrap());
    assert!(ratio > 0.0 && ratio <= 5000.0 / best * 1.01, "{row}");
    let asked = fs::read_to_string(FOLDER.join(log(words))).unwrap();
    let asked: Vec<&str> = asked.lines().collect();
    assert_eq!(asked.len(), 1 + 5, "{asked:?}");
    assert!(asked.iter().all(|line| line.starts_with("2 {")), "two threads: {asked:?}");
    let prepare: Value = serde_json::from_str(&asked[0][2..]).unwrap();
    let case = [("b", 1), ("hq", 4), ("hk", 2), ("n", 8), ("m", 8), ("d", 4)];
    assert!(case.iter().all(|(name, value)| prepare[name] == *value), "{prepare}");
    assert_eq!((&prepare["dtype"], &prepare["direction"]), (&"f32".into(), &"forward".into()));
    assert_eq!((&prepare["do"], &prepare["causal"]), (&"prepare".into(), &true.into()));
    for line in &asked[1..] {
        let measure: Value = serde_json::from_str(&line[2..]).unwrap();
        assert_eq!((&measure["do"], &measure["seconds"]), (&"measure".into(), &0.001.into()));
    }
}

#[cfg(unix)]
#[test]
fn geometric_means_and_the_worst_case_are_those_of_the_table() {
    let shapes = "--shape 1,1,1,8,8,4 --shape 1,2,2,64,64,16";
    let out = well(&format!("--markdown {shapes} --dtype f32 --against torch --python ./right --rounds 6"));
    assert!(out.contains("PyTorch 9.9"), "{out}");
    assert!(out.contains("the geometric mean of the medians of 6 alternating rounds"), "{out}");
    let cells = |line: &str| line.split('|').map(|cell| cell.trim().to_string()).collect::<Vec<_>>();
    let mut lines = out.lines();
    let column =
        cells(lines.find(|line| line.contains("| ratio |")).unwrap()).iter().position(|c| c == "ratio").unwrap();
    let ratios: Vec<f64> = out
        .lines()
        .filter(|line| line.contains("| forward |"))
        .map(|line| cells(line)[column].parse().unwrap())
        .collect();
    let group = out.lines().find(|line| line.starts_with("| f32 forward |")).unwrap();
    let [count, mean] = [2, 3].map(|at| cells(group)[at].parse::<f64>().unwrap());
    assert_eq!((ratios.len(), count), (2, 2.0));
    assert!((mean / (ratios[0] * ratios[1]).sqrt() - 1.0).abs() < 1e-3, "{out}");
    let worst = format!("The worst case: {:.2}, ", ratios[0].min(ratios[1]));
    assert!(out.lines().last().unwrap().starts_with(&worst), "{out}");
}

#[cfg(unix)]
#[test]
fn an_anchor_that_does_not_work_is_told_clearly() {
    let with = |python: &str, said: &[&str]| {
        refused(&format!("--shape 1,1,1,8,8,4 --against torch --python {python}"), 1, said);
    };
    with("./not-there", &["`./not-there`: cannot start this Python", "hint: select", "`--python PATH`"]);
    with("./no-torch", &["`./no-torch`: this Python has no PyTorch: ModuleNotFoundError", "hint: "]);
    with("./dies", &["`./dies`: this Python ended without an answer (exit status: 3)", "Killed by a test"]);
    with("./dies-at-once", &["`./dies-at-once`: this Python ended without an answer (exit status: 0)"]);
    with("./babbles", &["`./babbles`: unexpected answer of this Python: Welcome to Python"]);
    with("./babbles-later", &["`./babbles-later`: unexpected answer of this Python", "best_ms"]);
    with("./fails", &["`./fails`: PyTorch failed: RuntimeError: no such thing"]);
}

#[test]
fn lengths_are_told_and_drawn() {
    let out = well("--json --lengths alone.svg --longest 1024 --threads 1");
    let points = rows(&out);
    let about: Vec<(u64, &str)> =
        points.iter().map(|point| (point["n"].as_u64().unwrap(), point["engine"].as_str().unwrap())).collect();
    assert_eq!(about, [(512, "qkv"), (512, "formula"), (1024, "qkv"), (1024, "formula")]);
    if cfg!(target_os = "linux") {
        let beyond = |at: usize| points[at]["beyond_bytes"].as_u64().unwrap();
        assert!(beyond(3) > 4 << 20, "the formula holds its scores: {out}");
        assert!(beyond(2) < beyond(3), "{out}");
    }
    let svg = fs::read_to_string(FOLDER.join("alone.svg")).unwrap();
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
    assert!(svg.contains("prefers-color-scheme:dark") && svg.contains(">1k</text>"));
    refused("--lengths no-such-folder/plot.svg --longest 512", 1, &["`no-such-folder/plot.svg`: cannot be written"]);
}

#[cfg(unix)]
#[test]
fn lengths_stand_beside_an_anchor() {
    let out = well("--lengths beside.svg --longest 512 --threads 1 --against torch --python ./right");
    for engine in ["qkv", "torch", "torch formula"] {
        assert!(out.lines().any(|line| line.contains(&format!("512  {engine} "))), "{out}");
    }
    assert!(out.lines().last().unwrap().ends_with("1.0"), "a MiB: {out}");
    let svg = fs::read_to_string(FOLDER.join("beside.svg")).unwrap();
    assert!(svg.contains("PyTorch, fused"));
}

#[test]
fn images_are_seen_alone_and_by_eight() {
    let rows = rows(&well("--images --json --threads 2"));
    assert_eq!(rows.iter().map(|row| row["images"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 8]);
    for row in &rows {
        let number = |name: &str| row[name].as_f64().unwrap();
        assert!(number("best_ms") > 0.0 && number("median_ms") >= number("best_ms"), "{row}");
        assert!((number("gflops") * number("best_ms") / (7716.0 * number("images")) - 1.0).abs() < 1e-3, "{row}");
    }
    refused("--images --shape 1,1,1,8,8,4", 2, &["--shape"]);
    if cfg!(unix) {
        let with = "--images --threads 2 --against torch --python";
        refused(&format!("{with} ./dies-at-once"), 1, &["`./dies-at-once`: PyTorch failed"]);
        refused(&format!("{with} ./not-there"), 1, &["`./not-there`: cannot start this Python"]);
        refused(
            &format!("{with} ./no-torch"),
            1,
            &["`./no-torch`: this Python has no PyTorch", "hint: select", "`--python PATH`"],
        );
    }
}

#[test]
fn help_tells_of_the_command_and_what_it_measures() {
    let ran = qkv("--help");
    assert!(ran.out.contains("bench") && !ran.out.contains("bench-memory"), "{}", ran.out);
    let help = qkv("bench --help").out;
    for word in ["--shape <B,Hq,Hk,N,M,D>", "--against <torch>", "--markdown", "`ratio`"] {
        assert!(help.contains(word), "no {word} in: {help}");
    }
}

#[test]
fn a_training_step_over_two_ranks_sends_the_gradient_once_from_each() {
    if !crate::models::ranks::has_mpi() {
        return;
    }
    let rows = rows(&well("--train --ranks 2 --threads 1 --micro-batches 2 --json"));
    assert_eq!(rows.len(), 2);
    for row in rows {
        // 2·(P − 1)/P of the gradient, in f32.
        assert_eq!(row["sent_bytes"].as_u64(), row["parameters"].as_u64().map(|count| 4 * count), "{row}");
        assert!(row["best_ms"].as_f64().unwrap() > 0.0 && row["alone_ms"].as_f64().unwrap() > 0.0, "{row}");
    }
    refused("--train --ranks 2 --micro-batches 1", 1, &["2 ranks for 1 micro-batches: each rank needs one"]);
}

#[test]
fn training_steps_are_measured_on_the_device_that_is_asked_for() {
    let ran = qkv("bench --train --device cuda --seconds 0.001 --against torch --python none");
    // The header comes before the first step, which needs the device.
    assert!(ran.out.contains("\none GPU\n") && ran.out.contains("step of"), "{}{}", ran.out, ran.err);
    assert_eq!(ran.code, Some(1), "{}", ran.err);
}
