//! Promises of a run: it can stop anywhere and ends with the same result; it learns its data; it refuses what it cannot
//! use.

use qkv_models::files::tensors::Storage;
use qkv_models::train::{Event, Outcome, Resume, Run, Validation, Watcher};
use qkv_models::{Recipe, Search, Translator};
use qkv_nn::Machine;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

fn recipe(changes: &[&str]) -> Recipe {
    let text = "
        name = 'tiny'
        [data]
        task = 'copy'
        pairs = 300
        dev_pairs = 20
        [tokenizer]
        kind = 'characters'
        [model]
        kind = 'transformer'
        d_model = 32
        ffn_dim = 64
        heads = 2
        encoder_layers = 1
        decoder_layers = 1
        [train]
        steps = 24
        tokens = 256
        warmup = 5
        average = 0.9
        validate = 8
        save = 7
        log = 3
    ";
    let changes: Vec<String> = changes.iter().map(|&change| change.to_owned()).collect();
    Recipe::parse(text, Path::new("tiny.toml"), &changes).unwrap()
}

/// Asks to stop after some steps.
struct StopAt<'a>(u64, &'a AtomicBool);

impl Watcher for StopAt<'_> {
    fn step(&mut self, event: &Event) {
        if event.step >= self.0 {
            self.1.store(true, Ordering::Relaxed);
        }
    }
}

fn bytes(folder: &Path, name: &str) -> Vec<u8> {
    std::fs::read(folder.join(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

const LAST: &str = "checkpoints/00000024/weights.safetensors";

#[test]
fn a_run_that_stopped_anywhere_ends_as_if_it_never_had() {
    let recurrent = "model={ kind = 'recurrent', d_model = 24, hidden = 16, attention_width = 16 }";
    for changes in [&["train.accumulate=2"][..], &[recurrent], &["train.precision=bf16"]] {
        let place = tempfile::tempdir().unwrap();
        let recipe = recipe(changes);
        let whole = place.path().join("whole");
        let outcome = Run::new(&recipe, &whole, 2).unwrap().train(&mut (), &AtomicBool::new(false)).unwrap();
        assert_eq!(outcome, Outcome::Finished);

        let parts = place.path().join("parts");
        let mut first = Some(Run::new(&recipe, &parts, 1).unwrap());
        for stop_at in [1, 4, 7, 8, 15, 23] {
            let mut run = first.take().unwrap_or_else(|| Run::resume(&parts, 1 + stop_at as usize % 3).unwrap());
            let stop = AtomicBool::new(false);
            assert_eq!(run.train(&mut StopAt(stop_at, &stop), &stop).unwrap(), Outcome::Interrupted);
            assert_eq!(run.step(), stop_at);
        }
        Run::resume(&parts, 2).unwrap().train(&mut (), &AtomicBool::new(false)).unwrap();
        for name in [
            LAST,
            "checkpoints/00000024/moments.safetensors",
            "model.safetensors",
            "checkpoints/00000024/average.safetensors",
        ] {
            assert!(bytes(&whole, name) == bytes(&parts, name), "{name} differs after {changes:?}");
        }
        // The metrics are those of an uninterrupted run, except for the seconds.
        let lines = |folder: &Path| -> Vec<serde_json::Value> {
            let text = String::from_utf8(bytes(folder, "metrics.jsonl")).unwrap();
            let line = |line: &str| {
                let mut line: serde_json::Value = serde_json::from_str(line).unwrap();
                line.as_object_mut().unwrap().remove("seconds");
                line
            };
            text.lines().map(line).collect()
        };
        assert_eq!(lines(&whole), lines(&parts));
    }
}

#[test]
fn a_checkpoint_that_was_cut_off_does_not_count() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().join("run");
    let stop = AtomicBool::new(false);
    Run::new(&recipe(&[]), &folder, 1).unwrap().train(&mut StopAt(9, &stop), &stop).unwrap();
    // A kill in the middle of writing leaves a folder without its last file, under a temporary name or this one.
    let half = folder.join("checkpoints/00000011");
    std::fs::create_dir(&half).unwrap();
    std::fs::write(half.join("weights.safetensors"), b"half").unwrap();
    assert_eq!(Run::resume(&folder, 1).unwrap().step(), 9);
}

/// A run of 24 steps that was stopped at step 15, with checkpoints of steps 14 and 15.
fn stopped(folder: &Path) {
    let stop = AtomicBool::new(false);
    Run::new(&recipe(&[]), folder, 1).unwrap().train(&mut StopAt(15, &stop), &stop).unwrap();
}

/// Changes a byte in the middle of a file.
fn damage(path: &Path) {
    let mut bytes = std::fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn a_damaged_checkpoint_is_refused_and_the_newest_whole_one_is_named() {
    let place = tempfile::tempdir().unwrap();
    let whole = place.path().join("whole");
    stopped(&whole);
    for name in ["weights.safetensors", "moments.safetensors", "average.safetensors", "state.json", "SHA256SUMS"] {
        let folder = place.path().join(name);
        copy(&whole, &folder);
        damage(&folder.join("checkpoints/00000015").join(name));
        let error = Run::resume(&folder, 1).unwrap_err();
        let (said, hint) = (error.to_string(), error.hint().unwrap());
        assert!(said.contains("00000015") && said.contains("is damaged"), "{name}: {said}");
        assert!(hint.contains("step 14") && hint.contains("--checkpoint 14"), "{name}: {hint}");
    }
    // The run resumes from there, and ends as it would have.
    let folder = place.path().join("weights.safetensors");
    let how = Resume { checkpoint: Some(14), ..Resume::default() };
    let mut run = Run::resume_with(&folder, &how, 1).unwrap();
    assert_eq!(run.step(), 14);
    run.train(&mut (), &AtomicBool::new(false)).unwrap();
    Run::resume(&whole, 1).unwrap().train(&mut (), &AtomicBool::new(false)).unwrap();
    assert!(bytes(&whole, LAST) == bytes(&folder, LAST));
    drop(run);
    let error = Run::resume_with(&folder, &how, 1).unwrap_err();
    assert!(error.hint().unwrap().contains("steps 21, 24"), "{error} {:?}", error.hint());
}

#[test]
fn a_checkpoint_whose_step_is_not_its_folders_or_whose_file_is_missing_is_refused() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().join("run");
    stopped(&folder);
    let checkpoints = folder.join("checkpoints");
    std::fs::remove_file(checkpoints.join("00000015/moments.safetensors")).unwrap();
    let error = Run::resume(&folder, 1).unwrap_err();
    assert!(error.to_string().ends_with("moments.safetensors` is damaged: it is missing"), "{error}");
    std::fs::remove_dir_all(checkpoints.join("00000015")).unwrap();
    std::fs::rename(checkpoints.join("00000014"), checkpoints.join("00000010")).unwrap();
    let error = Run::resume(&folder, 1).unwrap_err();
    assert!(error.to_string().contains("it is of step 14, its folder of step 10"), "{error}");
    assert_eq!(error.hint().as_deref(), Some("no other checkpoint of the run is whole"));
}

#[test]
fn an_edited_tokenizer_is_refused() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().join("run");
    stopped(&folder);
    let path = folder.join("tokenizer.json");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text + "\n").unwrap();
    let error = Run::resume(&folder, 1).unwrap_err();
    assert!(error.to_string().contains("tokenizer.json` is damaged"), "{error}");
}

#[test]
fn a_deleted_metrics_file_is_continued_without_filling() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().join("run");
    stopped(&folder);
    std::fs::remove_file(folder.join("metrics.jsonl")).unwrap();
    Run::resume(&folder, 1).unwrap().train(&mut (), &AtomicBool::new(false)).unwrap();
    let text = String::from_utf8(bytes(&folder, "metrics.jsonl")).unwrap();
    let steps: Vec<u64> = text
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["step"].as_u64().unwrap())
        .collect();
    assert_eq!(steps.first(), Some(&16), "{text}");
}

#[test]
fn a_checkpoint_from_before_there_were_checksums_is_still_read() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().join("run");
    stopped(&folder);
    let checkpoint = folder.join("checkpoints/00000015");
    std::fs::remove_file(checkpoint.join("SHA256SUMS")).unwrap();
    let error = Run::resume(&folder, 1).unwrap_err();
    assert!(error.to_string().contains("SHA256SUMS` is damaged: it is missing"), "{error}");
    let old = "{ \"step\": 15, \"epoch\": 0, \"batch\": 15, \"best\": 1.5, \"best_step\": 8, \"stale\": 0, \"metrics_bytes\": 10 }";
    std::fs::write(checkpoint.join("state.json"), old).unwrap();
    assert_eq!(Run::resume(&folder, 1).unwrap().step(), 15);
}

#[test]
fn a_run_in_use_is_refused_and_left_as_it_is() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().join("run");
    stopped(&folder);
    let held = Run::resume(&folder, 1).unwrap();
    let before = bytes(&folder, "recipe.toml");
    let how = Resume { changes: vec!["train.lr=5e-3".into()], ..Resume::default() };
    let error = Run::resume_with(&folder, &how, 1).unwrap_err();
    assert!(error.to_string().contains(&format!("in use by process {}", std::process::id())), "{error}");
    assert_eq!(bytes(&folder, "recipe.toml"), before);
    drop(held);
    assert!(Run::resume_with(&folder, &how, 1).is_ok());
}

#[test]
fn resuming_removes_what_killed_processes_left() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().join("run");
    stopped(&folder);
    let litter =
        ["checkpoints/.00000021.4294967294.part", "checkpoints/00000003", ".model.safetensors.4294967294.part"];
    for name in litter {
        std::fs::create_dir(folder.join(name)).unwrap();
        std::fs::write(folder.join(name).join("weights.safetensors"), b"half").unwrap();
    }
    assert_eq!(Run::resume(&folder, 1).unwrap().step(), 15);
    assert!(litter.iter().all(|name| !folder.join(name).exists()));
}

#[test]
fn fewer_steps_than_were_taken_are_refused_and_the_recipe_stays() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().join("run");
    stopped(&folder);
    let before = bytes(&folder, "recipe.toml");
    let how = Resume { changes: vec!["train.steps=10".into()], ..Resume::default() };
    let error = Run::resume_with(&folder, &how, 1).unwrap_err();
    assert_eq!(error.to_string(), "the run is at step 15, beyond `train.steps` = 10");
    assert_eq!(bytes(&folder, "recipe.toml"), before);
}

#[test]
fn a_run_without_its_recipe_is_not_told_to_resume() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().join("run");
    stopped(&folder);
    std::fs::remove_file(folder.join("recipe.toml")).unwrap();
    let error = Run::resume(&folder, 1).unwrap_err();
    assert!(error.to_string().contains("has no `recipe.toml`"), "{error}");
    let error = Run::new(&recipe(&[]), &folder, 1).unwrap_err();
    assert!(!error.hint().unwrap().contains("--resume"), "{error}");
}

/// Copies a folder.
fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let to = to.join(path.file_name().unwrap());
        match path.is_dir() {
            true => copy(&path, &to),
            false => assert!(std::fs::copy(&path, &to).is_ok()),
        }
    }
}

#[test]
fn a_folder_that_is_taken_is_not_written_over() {
    let place = tempfile::tempdir().unwrap();
    std::fs::write(place.path().join("mine"), b"work").unwrap();
    let error = Run::new(&recipe(&[]), place.path(), 1).unwrap_err();
    assert!(error.to_string().contains("not empty") && error.hint().unwrap().contains("--out"), "{error}");
    std::fs::write(place.path().join("recipe.toml"), b"").unwrap();
    let error = Run::new(&recipe(&[]), place.path(), 1).unwrap_err();
    assert!(error.hint().unwrap().contains("--resume"), "{error}");
}

#[test]
fn a_loss_that_is_no_number_stops_the_run_and_names_the_step() {
    let place = tempfile::tempdir().unwrap();
    let recipe = recipe(&["train.lr=1e30", "train.clip=0"]);
    let mut run = Run::new(&recipe, place.path().join("run"), 1).unwrap();
    let error = run.train(&mut (), &AtomicBool::new(false)).unwrap_err();
    assert!(error.to_string().contains("step") && error.to_string().contains("batch"), "{error}");
}

/// Keeps the last validation.
#[derive(Default)]
struct Last(Option<Validation>);

impl Watcher for Last {
    fn validated(&mut self, validation: &Validation, _better: bool) {
        self.0 = Some(validation.clone());
    }
}

#[test]
fn a_small_model_learns_to_copy_and_its_alignment_is_the_diagonal() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().join("run");
    let recipe = recipe(&[
        "data.pairs=4000",
        "model.d_model=64",
        "model.encoder_layers=2",
        "model.decoder_layers=2",
        "train.steps=300",
        "train.tokens=1024",
        "train.lr=4e-3",
        "train.warmup=60",
        "train.average=0.95",
        "train.validate=300",
        "train.save=300",
        "train.metric='exact'",
    ]);
    let mut last = Last::default();
    let mut run = Run::new(&recipe, &folder, 1).unwrap();
    run.train(&mut last, &AtomicBool::new(false)).unwrap();
    let exact = last.0.unwrap().exact;
    assert!(exact >= 90.0, "{exact} % of copies are right");

    let translator = Translator::open(&folder).unwrap();
    let machine = Machine::new(2);
    let pair = &run.dev()[0];
    let found = translator.translate(&[&pair.source], &Search::default(), &machine).unwrap();
    let source = translator.tokenizer.encode(&pair.source);
    let alignment = translator.align(&source, &found[0][0].tokens, &machine).unwrap();
    assert_eq!(alignment.weights.len(), alignment.target.len());
    for row in &alignment.weights {
        let sum: f32 = row.iter().sum();
        assert!((sum - 1.0).abs() < 1e-4, "weights sum to {sum}");
    }
    let diagonal = alignment.weights.iter().enumerate().filter(|(i, row)| {
        let best = row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0;
        best.abs_diff(*i) <= 1
    });
    assert!(2 * diagonal.count() > alignment.weights.len(), "{alignment:?}");
}

/// With packed matrices, in f32 and in 8 bits: alone or in a batch, on one thread or two, a sentence has the same
/// translations and scores, bit for bit.
fn bits_do_not_depend_on_the_batch(translator: &Translator, lines: &[&str], search: &Search) {
    for int8 in [false, true] {
        let [one, two] = [1, 2].map(|threads| Machine::new(threads).int8(int8));
        let all = translator.translate(lines, search, &two).unwrap();
        assert_eq!(all, translator.translate(lines, search, &one).unwrap(), "8 bits: {int8}");
        for (line, found) in lines.iter().zip(&all) {
            assert_eq!(translator.translate(&[line], search, &one).unwrap()[0], *found, "8 bits: {int8}");
        }
        // Many batches for each thread.
        let many: Vec<&str> = lines.iter().copied().cycle().take(40 * lines.len()).collect();
        let repeated = translator.translate(&many, search, &two).unwrap();
        assert!(repeated.chunks_exact(lines.len()).all(|part| part == all), "8 bits: {int8}");
    }
}

#[test]
fn search_finds_what_it_promises() {
    let place = tempfile::tempdir().unwrap();
    let mut run = Run::new(&recipe(&[]), place.path().join("run"), 2).unwrap();
    run.train(&mut (), &AtomicBool::new(false)).unwrap();
    let translator = run.translator().expect("it makes text");
    let machine = Machine::new(2);
    let lines: Vec<&str> = run.dev().iter().map(|pair| pair.source.as_str()).collect();
    let search = Search { beam: 4, ..Search::default() };
    let all = translator.translate(&lines, &search, &machine).unwrap();
    for (line, found) in lines.iter().zip(&all) {
        // Alone or in a batch, with or without the cache, a sentence gets the same translation.
        let alone = translator.translate(&[line], &search, &machine).unwrap();
        assert_eq!(alone[0][0].tokens, found[0].tokens);
        assert!(found.windows(2).all(|two| two[0].score >= two[1].score));
    }
    let uncached = translator.translate(&lines, &Search { cache: false, ..search.clone() }, &machine).unwrap();
    for (cached, uncached) in all.iter().zip(&uncached) {
        assert_eq!(cached[0].tokens, uncached[0].tokens);
        assert!((cached[0].log_probability - uncached[0].log_probability).abs() < 1e-3);
    }
    let folder = place.path().join("packed");
    translator.save(&folder, Storage::F32).unwrap();
    bits_do_not_depend_on_the_batch(&Translator::open(&folder).unwrap(), &lines, &search);
    let drawn = Search { beam: 3, sample: Some(Default::default()), ..Search::default() };
    let first = translator.translate(&lines, &drawn, &machine).unwrap();
    assert_eq!(first, translator.translate(&lines, &drawn, &machine).unwrap());
    let without_repeats = Search { beam: 2, no_repeat: 2, ..Search::default() };
    for found in translator.translate(&lines, &without_repeats, &machine).unwrap() {
        let tokens = &found[0].tokens;
        let pairs: std::collections::HashSet<_> = tokens.windows(2).collect();
        assert_eq!(pairs.len(), tokens.len().saturating_sub(1));
    }
    assert_eq!(translator.translate(&[""], &search, &machine).unwrap()[0][0].text, "");
}
