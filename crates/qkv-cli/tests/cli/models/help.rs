//! The small commands: doctor, completions, the manual; and help.

use crate::models::program::Folder;

#[test]
fn doctor_says_what_was_picked() {
    let folder = Folder::new();
    let out = folder.qkv("doctor").quietly();
    for said in ["qkv ", "cpu ", "features ", "isa ", "threads ", "kernels ", "bf16 ", "gpu        ", "model "] {
        assert!(out.contains(said), "no {said:?} in: {out}");
    }
    let health: serde_json::Value = serde_json::from_str(&folder.qkv("doctor --json").quietly()).unwrap();
    assert!(health["available"].as_array().unwrap().contains(&health["isa"]));
    let forced = folder.command(&["doctor", "--json"]).env("QKV_ISA", "portable").output().unwrap();
    let health: serde_json::Value = serde_json::from_slice(&forced.stdout).unwrap();
    assert_eq!((&health["isa"], &health["asked"]), (&"portable".into(), &"portable".into()));
    assert_eq!(health["kernels"]["f32"], "portable");
}

#[test]
fn completions_and_the_manual_come_from_the_same_table() {
    let folder = Folder::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let out = folder.qkv(&format!("completions {shell}")).quietly();
        assert!(out.contains("log-format") && out.contains("length-penalty"), "{shell}: {out}");
    }
    folder.qkv("completions cmd").misused(&["cmd"]);
    let out = folder.qkv("man").quietly();
    assert!(out.contains(".TH qkv") && out.contains("translate"), "{out}");
    let out = folder.qkv("man translate").quietly();
    assert!(out.contains("pharaoh") && out.contains("qkv translate 好久不见"), "{out}");
    folder.qkv("man walk").fails(&["there is no command `walk`", "hint: see `qkv --help`"]);
}

#[test]
fn every_command_has_help_with_examples_and_exit_codes() {
    let folder = Folder::new();
    for command in [
        "train",
        "translate",
        "show",
        "explore",
        "eval",
        "generate",
        "embed",
        "inspect",
        "convert",
        "run",
        "bench",
        "doctor",
        "completions",
        "man",
    ] {
        let out = folder.qkv(&format!("{command} --help")).quietly();
        assert!(out.contains("Examples:\n") && out.contains("Exit codes: 0 success, 1 "), "{out}");
        assert!(out.contains(&format!("  qkv {command}")), "{out}");
    }
    assert!(folder.qkv("--help").quietly().contains("130 interrupted after saving"));
}
