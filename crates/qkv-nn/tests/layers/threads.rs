//! Attention uses the machine's number of threads, forward, backward and in decoding, and gives the same bits with any
//! number.

use qkv::{Attention, Mask};
use qkv_nn::layers::KvCache;
use qkv_nn::{AttendOptions, Gradients, Heads, Machine, Parameters, Pool, Tape, Tensor};

const HEADS: Heads = Heads { query: 4, key: 2 };

fn numbers(shape: &[usize], seed: usize) -> Tensor<f32> {
    let len = shape.iter().product();
    Tensor::new((0..len).map(|at| ((at * 37 + seed * 11) % 101) as f32 / 50.0 - 1.0).collect(), shape)
}

/// Values, the gradients of q, k and v, and the output of a decoding step.
fn outputs(machine: &Machine, length: usize, attention: &Attention) -> Vec<Vec<f32>> {
    let (parameters, pool) = (Parameters::new(), Pool::new());
    let mut gradients = Gradients::of(&parameters);
    let options = AttendOptions { heads: HEADS, ..AttendOptions::new(attention) };
    let shapes = [[1, length, 64], [1, length, 32], [1, length, 32]];
    let inputs: Vec<_> = shapes.iter().enumerate().map(|(seed, shape)| numbers(shape, seed)).collect();

    let mut tape = Tape::inference(&parameters, &pool, machine);
    let [q, k, v] = [0, 1, 2].map(|at| tape.constant(inputs[at].clone()));
    let inferred = tape.attend(&q, &k, &v, None, &options).unwrap();
    let mut cache = KvCache::new(1, HEADS, [16, 16]);
    cache.append(&inputs[1], &inputs[2]).unwrap();
    let last = tape.constant(numbers(&[1, 1, 64], 9));
    let decoded = tape.attend_cached(&last, &cache, &AttendOptions { start: length - 1, ..options }).unwrap();

    let mut tape = Tape::training(&parameters, &mut gradients, &pool, machine, 1);
    let vars = [0, 1, 2].map(|at| tape.input(inputs[at].clone()));
    let out = tape.attend(&vars[0], &vars[1], &vars[2], None, &options).unwrap();
    assert_eq!(out.value().data(), inferred.value().data(), "training and inference compute the same");
    tape.seed(&out, numbers(&[1, length, 64], 5));
    tape.backward();
    let gradients = vars.iter().map(|var| tape.gradient(var).unwrap().data().to_vec());
    [inferred.value().data().to_vec(), decoded.value().data().to_vec()].into_iter().chain(gradients).collect()
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    for attention in [Attention::scaled_dot().mask(Mask::causal()), Attention::scaled_dot().sparsemax()] {
        let one = outputs(&Machine::new(1), 200, &attention);
        for threads in [2, 3] {
            assert!(outputs(&Machine::new(threads), 200, &attention) == one, "{threads} threads, {attention:?}");
        }
    }
}

#[test]
fn sequences_that_were_reordered_attend_as_if_their_rows_had_been_copied() {
    let (parameters, pool, machine) = (Parameters::<f32>::new(), Pool::new(), Machine::new(2));
    let attention = Attention::scaled_dot().mask(Mask::causal());
    let options = AttendOptions { heads: HEADS, ..AttendOptions::new(&attention) };
    let keys = |batch: usize, length: usize, seed: usize| numbers(&[batch, length, 32], seed);
    // Two sequences of five tokens, of which the second is kept twice; then each is extended by two tokens.
    let mut cache = KvCache::new(2, HEADS, [16, 16]);
    cache.append(&keys(2, 5, 1), &keys(2, 5, 2)).unwrap();
    cache.select(&[1, 0, 1]);
    for seed in [3, 5] {
        cache.append(&keys(3, 1, seed), &keys(3, 1, seed + 1)).unwrap();
    }
    let mut tape = Tape::inference(&parameters, &pool, &machine);
    let q = tape.constant(numbers(&[3, 1, 64], 9));
    let options = AttendOptions { start: 6, ..options };
    let together = tape.attend_cached(&q, &cache, &options).unwrap();
    for (row, from) in [1, 0, 1].into_iter().enumerate() {
        let sequence = |first: usize| {
            let start = keys(2, 5, first).data()[from * 5 * 32..][..5 * 32].to_vec();
            let rest = [3, 5].map(|seed| keys(3, 1, seed + first - 1).data()[row * 32..][..32].to_vec());
            Tensor::new([start, rest.concat()].concat(), &[1, 7, 32])
        };
        let mut alone = KvCache::new(1, HEADS, [16, 16]);
        alone.append(&sequence(1), &sequence(2)).unwrap();
        let q = tape.constant(Tensor::new(q.value().data()[row * 64..][..64].to_vec(), &[1, 1, 64]));
        let alone = tape.attend_cached(&q, &alone, &options).unwrap();
        assert_eq!(together.value().data()[row * 64..][..64], *alone.value().data(), "sequence {row}");
    }
}

/// CPU time of the pool's threads, as reported by the Linux kernel.
#[cfg(target_os = "linux")]
#[test]
fn a_machine_of_one_thread_leaves_the_other_threads_of_the_pool_alone() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(4).build().unwrap();
    let tasks = pool.broadcast(|_| std::fs::read_link("/proc/thread-self").unwrap());
    let nanoseconds = || -> Vec<f64> {
        let time = |task: &std::path::PathBuf| {
            let times = std::fs::read_to_string(std::path::Path::new("/proc").join(task).join("schedstat")).unwrap();
            times.split(' ').next().unwrap().parse().unwrap()
        };
        tasks.iter().map(time).collect()
    };
    let busiest = |threads: usize| {
        let before = nanoseconds();
        pool.install(|| outputs(&Machine::new(threads), 4096, &Attention::scaled_dot()));
        let spent: Vec<f64> = nanoseconds().iter().zip(before).map(|(after, before)| after - before).collect();
        spent.iter().copied().fold(0.0, f64::max) / spent.iter().sum::<f64>()
    };
    let share = busiest(1);
    assert!(share > 0.9, "the calling thread did {share:.2} of the work");
    let share = busiest(4);
    assert!(share < 0.8, "one of four threads did {share:.2} of the work");
}
