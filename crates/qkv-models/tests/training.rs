//! What is true of a run: it can stop anywhere and ends the same; it learns what it is given; it refuses what it cannot use.

use qkv_models::train::{Event, Outcome, Run, Validation, Watcher};
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
        // The measurements are those of one run, but for the time they took.
        let lines = |folder: &Path| -> Vec<serde_json::Value> {
            let text = String::from_utf8(bytes(folder, "metrics.jsonl")).unwrap();
            let line = |line: &str| {
                let mut line: serde_json::Value = serde_json::from_str(line).unwrap();
                line.as_object_mut().unwrap().remove("seconds");
                line
            };
            text.lines().map(line).collect()
        };
        let steps =
            |folder: &Path| -> Vec<u64> { lines(folder).iter().map(|line| line["step"].as_u64().unwrap()).collect() };
        assert_eq!(steps(&whole), steps(&parts));
    }
}

#[test]
fn a_checkpoint_that_was_cut_off_does_not_count() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().join("run");
    let stop = AtomicBool::new(false);
    Run::new(&recipe(&[]), &folder, 1).unwrap().train(&mut StopAt(9, &stop), &stop).unwrap();
    // A kill in the middle of writing leaves a folder without its last file, under another name or this one.
    let half = folder.join("checkpoints/00000011");
    std::fs::create_dir(&half).unwrap();
    std::fs::write(half.join("weights.safetensors"), b"half").unwrap();
    assert_eq!(Run::resume(&folder, 1).unwrap().step(), 9);
}

#[test]
fn a_folder_that_is_taken_is_not_written_over() {
    let place = tempfile::tempdir().unwrap();
    std::fs::write(place.path().join("mine"), b"work").unwrap();
    let error = Run::new(&recipe(&[]), place.path(), 1).unwrap_err();
    assert!(error.to_string().contains("not empty") && error.hint().unwrap().contains("--resume"), "{error}");
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
    let mut run = Run::new(&recipe, &folder, 2).unwrap();
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
        // Alone or among others, with the cache or without, a sentence is translated the same.
        let alone = translator.translate(&[line], &search, &machine).unwrap();
        assert_eq!(alone[0][0].tokens, found[0].tokens);
        assert!(found.windows(2).all(|two| two[0].score >= two[1].score));
    }
    let uncached = translator.translate(&lines, &Search { cache: false, ..search.clone() }, &machine).unwrap();
    for (cached, uncached) in all.iter().zip(&uncached) {
        assert_eq!(cached[0].tokens, uncached[0].tokens);
        assert!((cached[0].log_probability - uncached[0].log_probability).abs() < 1e-3);
    }
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
