//! Training on several ranks gives the weights of one, byte for byte, even if a run is stopped and continued on other
//! ranks.

use qkv_models::train::{Event, Outcome, Resume, Run, Watcher};
use qkv_models::{Error, Recipe, Result};
use qkv_ranks::{Ranks, run_in_process};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

const TRANSFORMER: &str = "
    [data]
    task = 'copy'
    pairs = 200
    dev_pairs = 10
    [model]
    kind = 'transformer'
    d_model = 16
    ffn_dim = 32
    heads = 2
    encoder_layers = 1
    decoder_layers = 1
    dropout = 0.1
    [tokenizer]
    kind = 'characters'
";

const GPT: &str = "
    [data]
    text = 'TEXT'
    dev = 'TEXT'
    [model]
    kind = 'gpt'
    d_model = 16
    heads = 2
    layers = 1
    max_positions = 32
    [tokenizer]
    kind = 'characters'
";

const HAN: &str = "
    [data]
    classes = 'CLASSES'
    dev = 'CLASSES'
    [model]
    kind = 'han'
    d_model = 12
    hidden = 8
    attention_width = 8
    words = 6
    entropy = 0.01
    [tokenizer]
    kind = 'words'
    size = 100
";

/// Steps of a run: 50 if every case is tested.
fn steps() -> u64 {
    if std::env::var_os("QKV_EVERY_CASE").is_some() { 50 } else { 12 }
}

/// A recipe with 8 micro-batches per step.
fn recipe(kind: &str, place: &Path) -> Recipe {
    recipe_with(kind, place, &[])
}

/// The same with changes.
fn recipe_with(kind: &str, place: &Path, changes: &[&str]) -> Recipe {
    let texts = place.join("texts.txt");
    let classes = place.join("classes.tsv");
    let words = |at: usize| format!("the {} cat {} sat on mat {}. It was {}.", at % 7, at % 3, at % 5, at % 2);
    std::fs::write(&texts, (0..200).map(|at| words(at) + "\n").collect::<String>()).unwrap();
    let line = |at: usize| format!("{}\t{}\n", ["even", "odd"][at % 2], words(at));
    std::fs::write(&classes, (0..80).map(line).collect::<String>()).unwrap();
    let kind = kind.replace("TEXT", texts.to_str().unwrap()).replace("CLASSES", classes.to_str().unwrap());
    let (steps, save, validate) = (steps(), steps() / 4, steps() / 2);
    let text = format!(
        "name = 'tiny'
        {kind}
        [train]
        steps = {steps}
        tokens = 128
        longest = 32
        accumulate = 8
        warmup = 5
        average = 0.9
        validate = {validate}
        validate_sentences = 5
        save = {save}
        log = 5
        metric = 'loss'"
    );
    let changes: Vec<String> = changes.iter().map(|&change| change.to_owned()).collect();
    Recipe::parse(&text, Path::new("tiny.toml"), &changes).unwrap()
}

/// Asks to stop after some steps, on one rank.
struct StopAt<'a>(u64, &'a AtomicBool);

impl Watcher for StopAt<'_> {
    fn step(&mut self, event: &Event) {
        if event.step >= self.0 {
            self.1.store(true, Ordering::Relaxed);
        }
    }
}

/// Each rank has its own thread pool, as a process would.
fn in_own_pool<R: Send>(work: impl FnOnce() -> R + Send) -> R {
    rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap().install(work)
}

fn open(ranks: Ranks, recipe: &Recipe, folder: &Path) -> Result<Run> {
    match (ranks.is_first(), folder.join("recipe.toml").exists()) {
        (false, _) => Run::join(ranks, 1),
        (true, true) => Run::resume_on(ranks, folder, &Resume::default(), 1),
        (true, false) => Run::new_on(ranks, recipe, folder, 1),
    }
}

/// Starts or resumes a run; the last rank asks to stop at a step.
fn train_on(size: usize, recipe: &Recipe, folder: &Path, stop_at: u64) -> Vec<Result<Outcome>> {
    run_in_process(size, |ranks| {
        in_own_pool(|| {
            let last = ranks.rank() + 1 == size;
            let stop = AtomicBool::new(false);
            let at = if last { stop_at } else { u64::MAX };
            open(ranks, recipe, folder)?.train(&mut StopAt(at, &stop), &stop)
        })
    })
}

/// Everything that a run leaves, except for times.
fn left(folder: &Path, steps: u64) -> Vec<(String, Vec<u8>)> {
    let read = |name: &str| (name.to_owned(), std::fs::read(folder.join(name)).unwrap());
    let mut found: Vec<_> = ["model.safetensors", "config.json"].into_iter().map(read).collect();
    for name in ["weights.safetensors", "moments.safetensors", "average.safetensors"] {
        found.push(read(&format!("checkpoints/{steps:08}/{name}")));
    }
    let text = String::from_utf8(read("metrics.jsonl").1).unwrap();
    let line = |line: &str| {
        let mut line: serde_json::Value = serde_json::from_str(line).unwrap();
        line.as_object_mut().unwrap().remove("seconds");
        line.to_string()
    };
    found.push(("metrics.jsonl".into(), text.lines().map(line).collect::<Vec<_>>().join("\n").into_bytes()));
    found
}

fn assert_same(found: &Path, expected: &Path, what: &str) {
    assert_same_at(found, expected, steps(), what);
}

fn assert_same_at(found: &Path, expected: &Path, steps: u64, what: &str) {
    for ((name, found), (_, expected)) in left(found, steps).iter().zip(&left(expected, steps)) {
        assert!(found == expected, "{name} differs: {what}");
    }
}

#[test]
fn the_weights_do_not_depend_on_the_number_of_ranks() {
    for (name, kind) in [("transformer", TRANSFORMER), ("gpt", GPT), ("han", HAN)] {
        let place = tempfile::tempdir().unwrap();
        let recipe = recipe(kind, place.path());
        let whole = place.path().join("whole");
        in_own_pool(|| Run::new(&recipe, &whole, 1).unwrap().train(&mut (), &AtomicBool::new(false)).unwrap());
        for size in [2, 3, 4, 8] {
            let folder = place.path().join(format!("{size}"));
            for outcome in train_on(size, &recipe, &folder, u64::MAX) {
                assert_eq!(outcome.unwrap(), Outcome::Finished);
            }
            assert_same(&folder, &whole, &format!("{name} on {size} ranks"));
        }
        // Stopped by its last rank, and continued on other numbers of ranks.
        let folder = place.path().join("parts");
        for (size, sixth) in [(3, 1), (1, 2), (8, 3), (2, 4)] {
            for outcome in train_on(size, &recipe, &folder, steps() * sixth / 6) {
                assert_eq!(outcome.unwrap(), Outcome::Interrupted);
            }
        }
        train_on(4, &recipe, &folder, u64::MAX);
        assert_same(&folder, &whole, &format!("{name} continued on other numbers of ranks"));
    }
}

#[test]
fn an_optimizer_over_ranks_has_the_bits_of_one_process() {
    // Large enough for several buckets, so that every rank has a part.
    let wide = &["model.d_model=256", "model.ffn_dim=512", "train.steps=6", "train.save=2", "train.validate=3"];
    let sharded = [&wide[..], &["parallel.optimizer=sharded"]].concat();
    let place = tempfile::tempdir().unwrap();
    let [whole, folder] = ["whole", "parts"].map(|name| place.path().join(name));
    train_on(1, &recipe_with(GPT, place.path(), wide), &whole, u64::MAX);
    let recipe = recipe_with(GPT, place.path(), &sharded);
    for size in [2, 3] {
        let folder = place.path().join(format!("{size}"));
        for outcome in train_on(size, &recipe, &folder, u64::MAX) {
            assert_eq!(outcome.unwrap(), Outcome::Finished);
        }
        assert_same_at(&folder, &whole, 6, &format!("on {size} ranks"));
    }
    for (size, step) in [(2, 1), (1, 2), (3, 4), (2, u64::MAX)] {
        assert!(train_on(size, &recipe, &folder, step).iter().all(Result::is_ok), "on {size} ranks");
    }
    assert_same_at(&folder, &whole, 6, "continued on other numbers of ranks");
}

#[test]
fn checkpoints_in_parts_are_read_by_any_number_of_ranks() {
    let place = tempfile::tempdir().unwrap();
    let [whole, folder] = ["whole", "parts"].map(|name| place.path().join(name));
    let wide = &["model.d_model=256", "model.ffn_dim=512", "train.steps=6", "train.save=2", "train.validate=3"];
    train_on(1, &recipe_with(GPT, place.path(), wide), &whole, u64::MAX);
    let parts = [&wide[..], &["parallel.checkpoint=sharded"]].concat();
    let recipe = recipe_with(GPT, place.path(), &parts);
    let files = |step: u64| {
        let found = std::fs::read_dir(folder.join(format!("checkpoints/{step:08}"))).unwrap();
        let mut found: Vec<String> = found.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        found.sort();
        found
    };
    for (size, step) in [(3, 1), (2, 3), (1, 4)] {
        assert!(train_on(size, &recipe, &folder, step).iter().all(Result::is_ok), "on {size} ranks");
        match size {
            1 => assert!(files(step).contains(&"weights.safetensors".into()), "{:?}", files(step)),
            _ => assert!(files(step).contains(&format!("moments-{size:05}-of-{size:05}.safetensors"))),
        }
        // The files of tensors, the checksums and the state.
        assert_eq!(files(step).len(), 3 * size + 2, "{:?}", files(step));
    }
    // Sharded optimizers write their own parts and read parts of any number.
    let sharded = [&parts[..], &["parallel.optimizer=sharded"]].concat();
    let recipe = recipe_with(GPT, place.path(), &sharded);
    std::fs::write(folder.join("recipe.toml"), recipe.to_toml()).unwrap();
    assert!(train_on(2, &recipe, &folder, 5).iter().all(Result::is_ok));
    damage_is_found(&folder.join("checkpoints/00000005/average-00002-of-00002.safetensors"), &folder);
    assert!(train_on(3, &recipe, &folder, u64::MAX).iter().all(Result::is_ok));
    let model = |folder: &Path| std::fs::read(folder.join("model.safetensors")).unwrap();
    assert!(model(&folder) == model(&whole), "the model differs");
    assert_eq!(files(6).len(), 3 * 3 + 2, "{:?}", files(6));
    // One process reads the parts and writes the same bytes as without ranks.
    assert!(train_on(1, &recipe, &folder, u64::MAX).iter().all(Result::is_ok));
    assert_same_at(&folder, &whole, 6, "written again by one process");
}

#[test]
fn the_bits_of_sequences_over_ranks_depend_on_the_size_of_a_group_alone() {
    let place = tempfile::tempdir().unwrap();
    let changes = ["parallel.context=2", "model.dropout=0.1", "train.accumulate=4", "train.recompute=true"];
    let recipe = recipe_with(GPT, place.path(), &changes);
    let sharded = recipe_with(GPT, place.path(), &[&changes[..], &["parallel.optimizer=sharded"]].concat());
    let [two, folder] = ["two", "parts"].map(|name| place.path().join(name));
    for outcome in train_on(2, &recipe, &two, u64::MAX) {
        assert_eq!(outcome.unwrap(), Outcome::Finished);
    }
    for (size, recipe) in [(4, &recipe), (6, &sharded), (8, &recipe)] {
        let folder = place.path().join(format!("{size}"));
        for outcome in train_on(size, recipe, &folder, u64::MAX) {
            assert_eq!(outcome.unwrap(), Outcome::Finished);
        }
        assert_same(&folder, &two, &format!("on {size} ranks"));
    }
    for (size, stop) in [(4, steps() / 2), (2, u64::MAX)] {
        assert!(train_on(size, &recipe, &folder, stop).iter().all(Result::is_ok), "on {size} ranks");
    }
    assert_same(&folder, &two, "continued on another number of ranks");
    // The loss of all steps is that of one process up to rounding.
    let whole = place.path().join("whole");
    train_on(1, &recipe_with(GPT, place.path(), &["train.accumulate=4"]), &whole, u64::MAX);
    let without_noise = place.path().join("without_noise");
    train_on(
        2,
        &recipe_with(GPT, place.path(), &["train.accumulate=4", "parallel.context=2"]),
        &without_noise,
        u64::MAX,
    );
    let losses = |folder: &Path| -> Vec<f64> {
        let text = std::fs::read_to_string(folder.join("metrics.jsonl")).unwrap();
        let line = |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap()["loss"].as_f64().unwrap();
        text.lines().map(line).collect()
    };
    for (found, expected) in losses(&without_noise).into_iter().zip(losses(&whole)) {
        assert!((found - expected).abs() < 1e-4 * expected, "{found} {expected}");
    }
}

#[test]
fn ranks_that_form_no_groups_are_refused() {
    let place = tempfile::tempdir().unwrap();
    let refused = |kind: &str, size: usize, change: &str| {
        let recipe = recipe_with(kind, place.path(), &[change]);
        let results = train_on(size, &recipe, &place.path().join(format!("{size}{change}")), u64::MAX);
        results.into_iter().next().unwrap().unwrap_err().to_string()
    };
    let said = refused(GPT, 3, "parallel.context=2");
    assert_eq!(said, "3 ranks for `parallel.context` = 2: they form groups of that many");
    let said = refused(GPT, 18, "parallel.context=2");
    assert_eq!(said, "9 groups of 2 ranks for 8 micro-batches a step: each group needs one");
    let said = refused(HAN, 2, "parallel.context=2");
    assert_eq!(said, "`parallel.context` is 2, and a `han` has whole sequences");
}

/// A part with a flipped bit and a missing part are refused by name.
fn damage_is_found(part: &Path, run: &Path) {
    let bytes = std::fs::read(part).unwrap();
    let mut damaged = bytes.clone();
    *damaged.last_mut().unwrap() ^= 1;
    std::fs::write(part, damaged).unwrap();
    let refused = |what: &str| {
        let error = in_own_pool(|| Run::resume(run, 1).unwrap_err()).to_string();
        assert!(error.contains("average-00002-of-00002.safetensors") && error.contains(what), "{error}");
    };
    refused("SHA-256");
    std::fs::remove_file(part).unwrap();
    refused("missing");
    std::fs::write(part, bytes).unwrap();
}

/// Panics at a step, as a rank with a bug would.
struct PanicAt(u64);

impl Watcher for PanicAt {
    fn step(&mut self, event: &Event) {
        assert!(event.step < self.0, "this rank ends here");
    }
}

#[test]
fn a_rank_that_is_gone_ends_all_and_what_was_saved_resumes() {
    let place = tempfile::tempdir().unwrap();
    let recipe = recipe(TRANSFORMER, place.path());
    let [whole, folder] = ["whole", "parts"].map(|name| place.path().join(name));
    train_on(1, &recipe, &whole, u64::MAX);
    for (size, gone, sixth) in [(3, 1, 2), (2, 0, 3), (4, 3, 4)] {
        let step = steps() * sixth / 6;
        let ended = run_in_process(size, |ranks| {
            let at = if ranks.rank() == gone { step } else { u64::MAX };
            let train =
                || in_own_pool(|| open(ranks, &recipe, &folder)?.train(&mut PanicAt(at), &AtomicBool::new(false)));
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(train))
        });
        for (rank, ended) in ended.into_iter().enumerate() {
            match ended {
                Err(_) => assert_eq!(rank, gone),
                Ok(Err(Error::Ranks(qkv_ranks::Error::Lost { .. }))) => assert_ne!(rank, gone),
                Ok(other) => panic!("rank {rank}: {other:?}"),
            }
        }
    }
    train_on(2, &recipe, &folder, u64::MAX);
    assert_same(&folder, &whole, "after ranks were lost");
}

#[test]
fn more_ranks_than_micro_batches_are_refused() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path().join("run");
    let recipe = recipe(TRANSFORMER, place.path());
    let results = train_on(9, &recipe, &folder, u64::MAX);
    let error = results.into_iter().next().unwrap().unwrap_err();
    assert_eq!(error.to_string(), "9 ranks for 8 micro-batches a step: each rank needs one");
    assert_eq!(error.hint().as_deref(), Some("set `train.accumulate` to 9 or more"));
    assert!(!folder.exists());
}
