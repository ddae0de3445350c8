//! Several ranks as processes over MPI: whole commands. Without MPI, the tests say so and pass.

use super::program::{Folder, RECIPE};
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

/// How many times a rank is killed; `cargo xtask kills` asks for more.
const KILLS: &str = "QKV_RANK_KILLS";

/// Whether there is an `mpiexec`; prints a line if not.
pub fn has_mpi() -> bool {
    let found = qkv_ranks::launch::mpiexec().is_some();
    if !found {
        println!("skipped: ranks over MPI (no `mpiexec`; `pip install mpich` brings one)");
    }
    found
}

/// A folder with a recipe of four micro-batches per step.
fn folder(steps: u64) -> Folder {
    let folder = Folder::new();
    let recipe = RECIPE.replace("steps = 40", &format!("steps = {steps}\naccumulate = 4"));
    folder.put("tiny.toml", recipe.replace("save = 10", "save = 5").as_bytes());
    folder
}

/// The files of a finished run whose bytes are compared.
fn files(folder: &Folder, run: &str, steps: u64) -> [Vec<u8>; 3] {
    let checkpoint = format!("checkpoints/{steps:08}");
    [
        "model.safetensors".to_owned(),
        format!("{checkpoint}/weights.safetensors"),
        format!("{checkpoint}/moments.safetensors"),
    ]
    .map(|name| folder.bytes(&format!("{run}/{name}")))
}

#[test]
fn any_number_of_ranks_ends_with_the_bytes_of_one_process() {
    if !has_mpi() {
        return;
    }
    let folder = folder(20);
    folder.qkv("train tiny.toml --out one --quiet").well();
    let whole = files(&folder, "one", 20);
    let ran = folder.qkv("train tiny.toml --out three --ranks 3");
    assert!(ran.err.contains("3 ranks of 1 thread"), "{}", ran.err);
    // One log and one summary, of the first rank.
    assert_eq!(ran.err.matches("step 10/20").count(), 1, "{}", ran.err);
    assert_eq!(ran.well().matches("best ").count(), 1);
    for ranks in [2, 4] {
        folder.qkv(&format!("train tiny.toml --out {ranks} --quiet --ranks {ranks}")).well();
    }
    // As a cluster's launcher starts them.
    let launcher = qkv_ranks::launch::mpiexec().unwrap();
    let mut launched = Command::new(launcher);
    launched.args(["-n", "2", env!("CARGO_BIN_EXE_qkv"), "train", "tiny.toml", "--out", "launched", "--quiet"]);
    let launched = launched.current_dir(folder.path()).stdin(Stdio::null()).output().unwrap();
    assert!(launched.status.success(), "{}", String::from_utf8_lossy(&launched.stderr));
    for run in ["2", "three", "4", "launched"] {
        assert!(files(&folder, run, 20) == whole, "`{run}` has other bytes");
    }
}

#[test]
fn a_run_continues_on_another_number_of_ranks() {
    if !has_mpi() {
        return;
    }
    let folder = folder(20);
    folder.qkv("train tiny.toml --out one --quiet").well();
    // To step 10 on three ranks, to 15 on one and to the end on two.
    let mut until = "--set train.steps=10 --ranks 3";
    folder.qkv(&format!("train tiny.toml --out run --quiet {until}")).well();
    until = "--set train.steps=15";
    folder.qkv(&format!("train --resume run --quiet {until}")).well();
    folder.qkv("train --resume run --quiet --set train.steps=20 --ranks 2").well();
    assert!(files(&folder, "one", 20)[1..] == files(&folder, "run", 20)[1..], "the end has other bytes");
}

#[test]
fn a_divided_optimizer_and_checkpoints_in_parts_change_no_byte() {
    if !has_mpi() {
        return;
    }
    let folder = folder(20);
    folder.qkv("train tiny.toml --out one --quiet").well();
    let divided = "train tiny.toml --out run --quiet --set parallel.optimizer=sharded --sharded";
    folder.qkv(&format!("{divided} --set train.steps=10 --ranks 3")).well();
    assert!(folder.path().join("run/checkpoints/00000010/moments-00003-of-00003.safetensors").is_file());
    folder.qkv("train --resume run --quiet --set train.steps=15 --ranks 2").well();
    folder.qkv("train --resume run --quiet --set train.steps=20 --set parallel.checkpoint=whole").well();
    assert!(files(&folder, "one", 20)[1..] == files(&folder, "run", 20)[1..], "the end has other bytes");
}

#[test]
fn more_ranks_than_micro_batches_are_refused_by_the_first() {
    if !has_mpi() {
        return;
    }
    let refused = folder(20).qkv("train tiny.toml --out five --ranks 5");
    assert_ne!(refused.code, Some(0));
    assert!(refused.err.contains("error: rank 0 of 5: 5 ranks for 4 micro-batches a step"), "{}", refused.err);
    assert!(refused.err.contains("hint: set `train.accumulate` to 5 or more"), "{}", refused.err);
}

#[test]
fn without_mpi_the_error_says_how_to_get_it() {
    let folder = folder(20);
    let mut command = folder.command(&["train", "tiny.toml", "--ranks", "2"]);
    command.env("PATH", "").env_remove("QKV_MPI").env_remove("QKV_MPIEXEC");
    let ran = command.output().unwrap();
    let err = String::from_utf8(ran.stderr).unwrap();
    assert_eq!(ran.status.code(), Some(1), "{err}");
    assert!(err.contains("no `mpiexec` on the path") && err.contains("hint: `pip install mpich`"), "{err}");
}

/// The processes of a run's ranks, found by the run's folder in their command lines.
pub fn ranks_of(run: &str) -> Vec<u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let is_rank = |pid: &u32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let words: Vec<String> =
            line.split(|&byte| byte == 0).map(|word| String::from_utf8_lossy(word).into()).collect();
        words.first().is_some_and(|program| Path::new(program).ends_with("qkv")) && words.iter().any(|word| word == run)
    };
    pids.filter(is_rank).collect()
}

pub fn signal(name: &str, pid: u32) {
    let _ = Command::new("kill").args([name, &pid.to_string()]).stderr(Stdio::null()).status();
}

/// Waits for a job that ends by itself.
pub fn ends(job: &mut Child, within: Duration) -> bool {
    let start = Instant::now();
    while start.elapsed() < within {
        if job.try_wait().unwrap().is_some() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    false
}

/// Kills or stops random ranks at random moments, with a different number of ranks each time, until the run is
/// finished.
#[test]
fn ranks_that_are_killed_or_stopped_end_all_and_nothing_is_lost() {
    if !has_mpi() || !Path::new("/proc/self/cmdline").exists() {
        return;
    }
    let kills: u64 = std::env::var(KILLS).ok().and_then(|kills| kills.parse().ok()).unwrap_or(4);
    // The second half with everything sharded that a run can shard.
    kill_ranks(kills.div_ceil(2), "");
    kill_ranks(kills.div_ceil(2), "--set parallel.optimizer=sharded --sharded");
}

fn kill_ranks(kills: u64, options: &str) {
    let steps = 40 + 20 * kills;
    let folder = folder(steps);
    folder.qkv("train tiny.toml --out one --quiet").well();
    let run = folder.path().join("run").display().to_string();
    let seed = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().subsec_nanos();
    let mut state = u64::from(seed);
    let mut draw = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let (mut killed, mut stopped, mut finished) = (0, 0, 0);
    for kill in 0..kills {
        let size = 2 + draw(3);
        let mut job = folder
            .start(&format!("train tiny.toml --out {run} --resume --quiet --rank-timeout 2 --ranks {size} {options}"));
        let start = Instant::now();
        std::thread::sleep(Duration::from_millis(200 + draw(1500)));
        let mut pids = ranks_of(&run);
        while pids.is_empty() && job.try_wait().unwrap().is_none() && start.elapsed() < Duration::from_secs(20) {
            std::thread::sleep(Duration::from_millis(10));
            pids = ranks_of(&run);
        }
        match pids.get(draw(pids.len().max(1) as u64) as usize) {
            None => finished += 1,
            // Every fourth one is stopped, the last of them included.
            Some(&pid) if (kills - kill) % 4 == 1 => {
                signal("-STOP", pid);
                stopped += 1;
            }
            Some(&pid) => {
                signal("-KILL", pid);
                killed += 1;
            }
        }
        assert!(ends(&mut job, Duration::from_secs(30)), "kill {kill} of {kills}, seed {seed}: the job hangs");
        let gone = Instant::now();
        while !ranks_of(&run).is_empty() {
            let left = ranks_of(&run);
            assert!(gone.elapsed() < Duration::from_secs(10), "kill {kill}, seed {seed}: {left:?} are still there");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    folder.qkv(&format!("train tiny.toml --out {run} --resume --quiet --ranks 3 {options}")).well();
    folder.qkv(&format!("train --resume {run} --quiet --set parallel.checkpoint=whole")).well();
    println!("seed {seed}: {killed} ranks killed, {stopped} stopped, {finished} runs were at their end before");
    assert!(files(&folder, "one", steps) == files(&folder, "run", steps), "seed {seed}: the end has other bytes");
}
