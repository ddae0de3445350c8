//! Runs that stop: interrupted or killed, and resumed to bit-identical weights.

use crate::models::program::Folder;
use std::process::{Child, Command, ExitStatus};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Steps that take a second or two.
const LONGER: &str = "--set train.steps=150 --set train.save=7 --set train.validate=50 --threads 1";

fn signal(child: &Child, name: &str) {
    let done = Command::new("kill").args([&format!("-{name}"), &child.id().to_string()]).status().unwrap();
    assert!(done.success());
}

fn wait(mut child: Child) -> ExitStatus {
    let start = Instant::now();
    loop {
        match child.try_wait().unwrap() {
            Some(status) => return status,
            None if start.elapsed() > Duration::from_secs(60) => panic!("it does not end"),
            None => sleep(Duration::from_millis(5)),
        }
    }
}

/// Waits until a file exists.
fn until(folder: &Folder, name: &str) {
    let start = Instant::now();
    while !folder.has(name) {
        assert!(start.elapsed() < Duration::from_secs(60), "{name} does not come");
        sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_run_that_is_killed_again_and_again_ends_with_the_same_weights() {
    let folder = Folder::with_recipe();
    let start = Instant::now();
    folder.qkv(&format!("train tiny.toml --out whole --quiet {LONGER}")).quietly();
    let whole = start.elapsed();
    let mut kills = 0;
    // The same command starts the run and resumes it.
    for part in [0.05, 0.3, 0.17, 0.4, 0.1, 0.25, 0.35] {
        let mut child = folder.start(&format!("train tiny.toml --out parts --resume --quiet {LONGER}"));
        sleep(whole.mul_f64(part));
        kills += usize::from(child.try_wait().unwrap().is_none());
        child.kill().unwrap();
        child.wait().unwrap();
    }
    assert!(kills > 1, "it was done before it could be killed");
    folder.qkv(&format!("train tiny.toml --out parts --resume --quiet {LONGER}")).quietly();
    for file in [
        "model.safetensors",
        "checkpoints/00000150/weights.safetensors",
        "checkpoints/00000150/moments.safetensors",
        "config.json",
        "recipe.toml",
    ] {
        assert!(folder.bytes(&format!("whole/{file}")) == folder.bytes(&format!("parts/{file}")), "{file} differs");
    }
    // Every measurement appears once, with the numbers of the uninterrupted run.
    let losses = |run: &str| -> Vec<(u64, Option<f64>)> {
        let lines = crate::models::program::json(&folder.text(&format!("{run}/metrics.jsonl")));
        lines.iter().map(|line| (line["step"].as_u64().unwrap(), line["bleu"].as_f64())).collect()
    };
    assert_eq!(losses("whole"), losses("parts"));
}

#[test]
fn an_interrupted_run_saves_says_how_to_go_on_and_exits_130() {
    let folder = Folder::with_recipe();
    folder.qkv(&format!("train tiny.toml --out whole --quiet {LONGER}")).quietly();
    for (name, run) in [("INT", "int"), ("TERM", "term")] {
        let child = folder.start(&format!("train tiny.toml --out {run} {LONGER} --set train.steps=100000"));
        until(&folder, &format!("{run}/checkpoints"));
        signal(&child, name);
        let ran = child.wait_with_output().unwrap();
        let err = String::from_utf8(ran.stderr).unwrap();
        assert_eq!(ran.status.code(), Some(130), "{err}");
        assert!(
            err.contains("interrupted at step ") && err.contains(&format!("continue with `qkv train --resume {run}`")),
            "{err}"
        );
    }
    // A setting changed on resuming is kept; the weights at step 150 do not depend on where the run stopped.
    let ran = folder.qkv("train --resume int --set train.steps=150 --threads 2");
    assert!(ran.err.contains(", from step "), "{}", ran.err);
    ran.well();
    assert!(folder.text("int/recipe.toml").contains("steps = 150"));
    assert_eq!(folder.bytes("whole/model.safetensors"), folder.bytes("int/model.safetensors"));
}

#[test]
fn a_second_signal_ends_at_once() {
    let folder = Folder::with_recipe();
    let child = folder.start(&format!("train tiny.toml --out a --quiet {LONGER} --set train.steps=100000"));
    until(&folder, "a/checkpoints");
    signal(&child, "INT");
    let _ = Command::new("kill").args(["-INT", &child.id().to_string()]).output();
    assert_eq!(wait(child).code(), Some(130));
    folder.qkv("train --resume a --quiet --set train.steps=8").well();
}

#[test]
fn a_run_that_was_killed_before_it_began_begins_anew() {
    let folder = Folder::with_recipe();
    // A kill while the recipe is being written leaves its hidden file; no system has a process of this number.
    let unfinished = format!("runs/tiny/.recipe.toml.{}.part", u32::MAX - 1);
    std::fs::create_dir_all(folder.path().join("runs/tiny")).unwrap();
    folder.put(&unfinished, b"name");
    folder.qkv("train tiny.toml --quiet --set train.steps=4 --resume").well();
    assert!(!folder.has(&unfinished) && folder.has("runs/tiny/model.safetensors"));
    // What somebody else put there is not ours to overwrite.
    std::fs::create_dir_all(folder.path().join("runs/other")).unwrap();
    folder.put("runs/other/.notes", b"mine");
    folder.qkv("train tiny.toml --out runs/other").fails(&["exists and is not empty"]);
}

#[test]
fn a_run_goes_on_only_with_its_own_recipe() {
    let folder = Folder::with_recipe();
    folder.qkv("train tiny.toml --quiet --set train.steps=4").well();
    folder
        .qkv("train tiny.toml --resume")
        .fails(&["was started with a different recipe", "`steps = 4` in the run, `steps = 40` now"]);
    folder.qkv("train --resume runs/tiny --out b").fails(&["`--out` cannot be used with the folder of a run"]);
    folder.qkv("train --resume runs/none").fails(&["cannot open `runs/none`"]);
    let once = folder.bytes("runs/tiny/model.safetensors");
    folder.qkv("train --resume runs/tiny --quiet").well();
    assert_eq!(folder.bytes("runs/tiny/model.safetensors"), once, "a run that is done stays as it is");
    folder
        .qkv("train --resume runs/tiny --quiet --set model.d_model=16")
        .fails(&["runs/tiny/checkpoints/00000004", "shape"]);
    assert!(folder.text("runs/tiny/recipe.toml").contains("d_model = 32"));
}

#[test]
fn a_checkpoint_that_is_cut_off_is_named() {
    let folder = Folder::with_recipe();
    folder.qkv("train tiny.toml --quiet --set train.steps=4").well();
    let path = "runs/tiny/checkpoints/00000004/moments.safetensors";
    let bytes = folder.bytes(path);
    folder.put(path, &bytes[..bytes.len() / 2]);
    folder.qkv("train --resume runs/tiny --quiet --set train.steps=8").fails(&[path]);
    folder.put("runs/tiny/checkpoints/00000004/state.json", b"{}");
    folder.qkv("train --resume runs/tiny --quiet").fails(&["00000004/state.json"]);
}
