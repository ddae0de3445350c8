//! Collectives between threads, for several numbers of ranks; and over MPI, if there is one.

mod context;
mod over_mpi;
mod ring;

use qkv_ranks::{Error, Ranks, run_in_process};

const SIZES: [usize; 5] = [1, 2, 3, 4, 8];

fn message(from: usize, to: usize) -> Vec<u8> {
    (0..from * 3 + to).map(|at| (at + from) as u8).collect()
}

/// Every collective, on one rank.
fn collectives(ranks: &Ranks) -> qkv_ranks::Result<()> {
    let (rank, size) = (ranks.rank(), ranks.size());
    let lens: Vec<usize> = (0..size).map(|from| message(from, rank).len()).collect();
    let found = ranks.all_to_all((0..size).map(|to| message(rank, to)).collect(), &lens)?;
    assert_eq!(found, (0..size).map(|from| message(from, rank)).collect::<Vec<_>>());
    let all = ranks.all_gather(&message(rank, 1))?;
    assert_eq!(all, (0..size).map(|from| message(from, 1)).collect::<Vec<_>>());
    for root in 0..size {
        assert_eq!(ranks.broadcast(root, message(rank, 9))?, message(root, 9));
    }
    ranks.barrier()
}

#[test]
fn every_rank_gets_what_was_meant_for_it() {
    for size in SIZES {
        let results = run_in_process(size, |ranks| collectives(&ranks));
        assert!(results.iter().all(Result::is_ok), "{results:?}");
    }
}

#[test]
fn groups_work_side_by_side() {
    let results = run_in_process(6, |ranks| {
        let (row, column) = (ranks.rank() / 3, ranks.rank() % 3);
        let of_row: Vec<usize> = (0..3).map(|column| row * 3 + column).collect();
        let of_column: Vec<usize> = (0..2).map(|row| row * 3 + column).collect();
        let row = ranks.group(&of_row)?.all_gather(&[ranks.rank() as u8])?.concat();
        let column = ranks.group(&of_column)?.all_gather(&[ranks.rank() as u8])?.concat();
        assert!(ranks.group(&[99]).is_err());
        Ok::<_, Error>((row, column))
    });
    assert_eq!(results[4], Ok((vec![3, 4, 5], vec![1, 4])));
}

#[test]
fn ranks_that_disagree_are_named() {
    let results = run_in_process(3, |ranks| ranks.agree("recipes", if ranks.rank() == 2 { "b" } else { "a" }));
    for result in results {
        let error = result.unwrap_err();
        assert_eq!(error.to_string(), "the ranks have different recipes: `a` on rank 0, `b` on rank 2");
    }
}

#[test]
fn whoever_waits_for_a_rank_that_is_gone_gets_an_error() {
    let results = run_in_process(3, |ranks: Ranks| if ranks.rank() == 1 { Ok(()) } else { ranks.barrier() });
    assert!(matches!(results[0], Err(Error::Lost { .. })), "{results:?}");
    assert!(matches!(results[2], Err(Error::Lost { .. })), "{results:?}");
}

#[test]
fn bytes_are_counted() {
    let results = run_in_process(4, |ranks| {
        let before = ranks.traffic();
        ranks.all_gather_sized(&[0; 100], &[100; 4])?;
        Ok::<_, Error>(ranks.traffic() - before)
    });
    assert!(results.iter().all(|count| count.as_ref().is_ok_and(|count| (count.sent, count.messages) == (300, 3))));
}
