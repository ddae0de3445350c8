//! Three recipes of this repository, shortened, on several numbers of ranks over MPI: the model and the optimizer's
//! state have the same bytes as with one process, even if a rank is killed and the run is resumed on a different number
//! of ranks. A few steps on few numbers of ranks here; `cargo xtask hashes` takes 50 steps on 1, 2, 3, 4 and 8.

use super::program::Folder;
use super::ranks::{ends, has_mpi, ranks_of, signal};
use sha2::{Digest, Sha256};
use std::path::Path;
use std::time::{Duration, Instant};

/// The number of steps; if set, every number of ranks is tested.
const STEPS: &str = "QKV_RANK_HASHES";

/// What differs from the recipes: one micro-batch per step for each of the most ranks, small micro-batches, and when
/// the run validates. Models, tokenizers, optimizers and precision are the recipes' own.
const SHORTER: &str = "--set train.tokens=128 --set train.validate_sentences=5";

/// The recipes, with smaller data in place of theirs; some made-up reviews replace the movie reviews.
const RECIPES: [(&str, &str); 3] = [
    ("dates", "--set data.pairs=2000 --set data.dev_pairs=5"),
    ("titles", "--set data.pairs=500 --set data.dev_pairs=5"),
    ("han", "--set data.classes=reviews.tsv --set data.dev=reviews.tsv --set tokenizer.size=200"),
];

/// Reviews of some sentences each.
fn reviews() -> String {
    let sentence = |at: usize| format!("the {} actor was {} in scene {}", at % 7, ["good", "bad"][at % 2], at % 11);
    let review = |at: usize| {
        let text: Vec<String> = (0..2 + at % 5).map(|line| sentence(at + 2 * line)).collect();
        format!("{}\t{}\n", ["pos", "neg"][at % 2], text.join(" <s> "))
    };
    (0..150).map(review).collect()
}

struct Trained<'a> {
    folder: &'a Folder,
    name: &'a str,
    steps: u64,
    most_ranks: usize,
    options: &'a str,
}

impl Trained<'_> {
    /// The words of the command that starts or resumes a run.
    fn words(&self, run: &str, ranks: usize) -> String {
        let Trained { name, steps, options, .. } = self;
        let recipe = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../recipes/{name}.toml"));
        let recipe = recipe.display();
        let (save, validate) = ((steps / 5).max(1), (steps / 2).max(1));
        let accumulate = self.most_ranks;
        format!(
            "train {recipe} --out {run} --resume --quiet --threads 1 --ranks {ranks} {SHORTER} {options} \
             --set train.accumulate={accumulate} --set train.steps={steps} --set train.save={save} \
             --set train.validate={validate}"
        )
    }

    fn train(&self, run: &str, ranks: usize) -> String {
        self.folder.qkv(&self.words(run, ranks)).well();
        self.hash(run)
    }

    /// The SHA-256 of the model and of the last checkpoint.
    fn hash(&self, run: &str) -> String {
        let checkpoint = format!("checkpoints/{:08}", self.steps);
        let files = ["weights", "moments", "average"].map(|name| format!("{run}/{checkpoint}/{name}.safetensors"));
        let mut digest = Sha256::new();
        for name in files.iter().chain([&format!("{run}/model.safetensors")]) {
            digest.update(self.folder.bytes(name));
        }
        digest.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect()
    }

    /// The step of the newest checkpoint.
    fn saved(&self, run: &str) -> Option<u64> {
        let found = std::fs::read_dir(format!("{run}/checkpoints")).into_iter().flatten().flatten();
        found.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).max()
    }

    /// Starts or resumes a run and kills one of its ranks after its next checkpoint.
    fn killed(&self, run: &str, ranks: usize) {
        let (before, start) = (self.saved(run), Instant::now());
        let mut job = self.folder.start(&self.words(run, ranks));
        while self.saved(run) == before && start.elapsed() < Duration::from_secs(300) {
            assert!(job.try_wait().unwrap().is_none(), "the run ended before it was killed");
            std::thread::sleep(Duration::from_millis(5));
        }
        let pids = ranks_of(run);
        let pid = *pids.last().expect("a rank is there");
        signal("-KILL", pid);
        assert!(ends(&mut job, Duration::from_secs(30)), "the job hangs");
        while !ranks_of(run).is_empty() {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

#[test]
fn three_recipes_have_the_same_hash_on_any_number_of_ranks() {
    if !has_mpi() || !Path::new("/proc/self/cmdline").exists() {
        return;
    }
    let asked: Option<u64> = std::env::var(STEPS).ok().and_then(|steps| steps.parse().ok());
    let numbers: &[usize] = if asked.is_some() { &[2, 3, 4, 8] } else { &[3] };
    // A run that was killed ends on four ranks.
    let most_ranks = numbers.iter().copied().max().unwrap_or(1).max(4);
    let kills: &[usize] = if asked.is_some() { &[3, 8, 2] } else { &[2] };
    for (name, options) in RECIPES {
        let folder = Folder::new();
        folder.put("reviews.tsv", reviews().as_bytes());
        let trained = Trained { folder: &folder, name, steps: asked.unwrap_or(4), most_ranks, options };
        let whole = trained.train("1", 1);
        println!("{name}, {} steps: {whole} on 1 rank", trained.steps);
        for &ranks in numbers {
            let found = trained.train(&ranks.to_string(), ranks);
            println!("{name}, {} steps: {found} on {ranks} ranks", trained.steps);
            assert_eq!(found, whole, "{name} on {ranks} ranks");
        }
        let sharded = format!("{options} --set parallel.optimizer=sharded");
        let found = Trained { options: &sharded, ..trained }.train("sharded", 3);
        println!("{name}, {} steps: {found} on 3 ranks with a sharded optimizer", trained.steps);
        assert_eq!(found, whole, "{name} with a sharded optimizer");
        let run = folder.path().join("killed").display().to_string();
        kills.iter().for_each(|&ranks| trained.killed(&run, ranks));
        let found = trained.train(&run, 4);
        println!("{name}, {} steps: {found} killed on {kills:?} ranks, ended on 4", trained.steps);
        assert_eq!(found, whole, "{name} on ranks that were killed");
    }
}
