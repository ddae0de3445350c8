//! The same over MPI, if there is one: the test starts itself as ranks.

use crate::collectives;
use qkv_ranks::{Mpi, MpiOptions, Ranks, launch};
use std::env;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What a rank that the tests started does.
const TASK: &str = "QKV_TEST_RANK";
/// Seconds after which the ranks of the tests give up on a silent neighbor.
const TIMEOUT: u64 = 2;

/// A job of this test binary's own ranks; `None`, with a message, without MPI.
fn job(ranks: usize, task: &str) -> Option<Child> {
    let program = env::current_exe().expect("a test has a path");
    match launch::command(ranks, &program, ["over_mpi::a_rank", "--exact", "--nocapture"]) {
        Ok(mut command) => {
            command.env(TASK, task).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
            Some(command.spawn().expect("`mpiexec` starts"))
        }
        Err(_) => {
            println!("skipped: ranks over MPI (no `mpiexec`; `pip install mpich` brings one)");
            None
        }
    }
}

/// Not a test by itself: what the ranks of the other tests run.
#[test]
fn a_rank() {
    let (Ok(task), true) = (env::var(TASK), launch::is_rank()) else { return };
    let on_lost = |error: &qkv_ranks::Error| println!("lost: {error}");
    let mpi = Arc::new(Mpi::start(MpiOptions { timeout: Duration::from_secs(TIMEOUT), on_lost }).expect("MPI starts"));
    let ranks = Ranks::new(mpi.clone());
    match task.as_str() {
        "collectives" => {
            collectives(&ranks).expect("every rank is here");
            // Longer than what a library sends at once.
            let long = vec![ranks.rank() as u8; 3 << 20];
            let all = ranks.all_gather(&long).expect("every rank is here");
            assert!(all.iter().enumerate().all(|(rank, bytes)| bytes.iter().all(|&byte| byte == rank as u8)));
            println!("rank {} of {} is done, {}", ranks.rank(), ranks.size(), mpi.version());
            mpi.finish().expect("the others finish too");
        }
        "wait" => {
            println!("pid {} {}", ranks.rank(), std::process::id());
            // Rank 0 never comes: the others wait, as they do while it validates.
            if ranks.is_first() {
                std::thread::sleep(Duration::from_secs(60));
            }
            let _ = ranks.barrier();
        }
        "fail" => {
            if ranks.rank() == 1 {
                mpi.abort(3);
            }
            let _ = ranks.barrier();
        }
        other => panic!("no task `{other}`"),
    }
}

#[test]
fn collectives_are_the_same_over_mpi() {
    for size in [1, 3] {
        let Some(job) = job(size, "collectives") else { return };
        let found = job.wait_with_output().expect("it ends");
        let text = String::from_utf8_lossy(&found.stdout);
        assert!(found.status.success(), "{text}{}", String::from_utf8_lossy(&found.stderr));
        assert_eq!(text.matches(&format!("of {size} is done")).count(), size, "{text}");
    }
}

#[test]
fn a_rank_that_fails_ends_all() {
    let Some(job) = job(3, "fail") else { return };
    assert!(!job.wait_with_output().expect("it ends").status.success());
}

/// Starts a job, sends a signal to rank 1, and expects the job to end by itself.
fn signalled(signal: &str, seconds: u64) -> Option<String> {
    let mut job = job(3, "wait")?;
    let mut lines = BufReader::new(job.stdout.take().expect("piped"));
    let mut pids = Vec::new();
    while pids.len() < 3 {
        let mut line = String::new();
        assert!(lines.read_line(&mut line).expect("text") > 0, "the ranks start");
        // What the test harness prints may stand before it on the line.
        if let Some((_, rest)) = line.split_once("pid ") {
            let mut words = rest.split_whitespace().map(|word| word.parse::<u32>().expect("a number"));
            pids.push((words.next().expect("rank"), words.next().expect("pid")));
        }
    }
    let (_, pid) = pids.iter().find(|(rank, _)| *rank == 1).expect("rank 1 started");
    let start = Instant::now();
    assert!(Command::new("kill").args([signal, &pid.to_string()]).status().expect("`kill` runs").success());
    let mut rest = String::new();
    lines.read_to_string(&mut rest).expect("text");
    assert!(!job.wait().expect("it ends").success());
    assert!(start.elapsed() < Duration::from_secs(seconds), "{:?}", start.elapsed());
    let is_there = |pid: &u32| {
        let found = Command::new("kill").args(["-0", &pid.to_string()]).stderr(Stdio::null()).status();
        found.expect("`kill` runs").success()
    };
    // The launcher may end a moment before the last of them.
    while pids.iter().any(|(_, pid)| is_there(pid)) {
        assert!(start.elapsed() < Duration::from_secs(seconds), "{pids:?} are still there");
        std::thread::sleep(Duration::from_millis(50));
    }
    Some(rest)
}

#[test]
fn a_rank_that_is_killed_ends_all() {
    signalled("-KILL", 10);
}

#[test]
fn a_rank_that_is_stopped_ends_all_after_the_timeout() {
    if let Some(rest) = signalled("-STOP", TIMEOUT + 10) {
        assert!(rest.contains("lost: rank 1 is gone: no sign of life for 2 s"), "{rest}");
    }
}
