//! Operations on images: their definitions in plain loops, and their gradients.

use super::gradients::{check, numbers, parameters};
use qkv_nn::layers::{Builder, Conv2d};
use qkv_nn::{Activation, BoxTarget, Machine, Parameters, Pool, Tape, Tensor, Windows2d, edges, generalized_iou};

const WINDOWS: [(Windows2d, [usize; 2]); 6] = [
    (Windows2d { kernel: [3, 3], stride: [1, 1], before: [1, 1], after: [1, 1] }, [4, 5]),
    (Windows2d { kernel: [3, 3], stride: [2, 2], before: [0, 0], after: [1, 1] }, [6, 4]),
    (Windows2d { kernel: [2, 3], stride: [1, 2], before: [0, 2], after: [1, 0] }, [3, 5]),
    (Windows2d { kernel: [5, 5], stride: [1, 1], before: [4, 4], after: [4, 4] }, [2, 1]),
    (Windows2d { kernel: [1, 1], stride: [2, 2], before: [0, 0], after: [0, 0] }, [5, 4]),
    (Windows2d { kernel: [3, 2], stride: [3, 3], before: [1, 0], after: [1, 1] }, [7, 7]),
];

#[test]
fn windows_over_images_are_their_definition() {
    let p = parameters(&[]);
    let (pool, machine) = (Pool::new(), Machine::new(2));
    for (windows, [height, width]) in WINDOWS {
        let x = numbers(&[2, height, width, 3], 4);
        let mut tape = Tape::inference(&p, &pool, &machine);
        let var = tape.constant(x.clone());
        let y = tape.unfold2d(&var, windows);
        let [rows, columns] = windows.count([height, width]);
        let [kernel, across] = windows.kernel;
        assert_eq!(y.shape(), [2, rows, columns, kernel * across * 3]);
        let pixel = |b: usize, y: usize, x_: usize, c: usize| {
            let y = y.checked_sub(windows.before[0]).filter(|&y| y < height)?;
            let x_ = x_.checked_sub(windows.before[1]).filter(|&x| x < width)?;
            Some(x.data()[((b * height + y) * width + x_) * 3 + c])
        };
        for (at, &found) in y.value().data().iter().enumerate() {
            let (c, l, k) = (at % 3, at / 3 % across, at / 3 / across % kernel);
            let window = at / 3 / across / kernel;
            let (column, row, b) = (window % columns, window / columns % rows, window / columns / rows);
            let there = pixel(b, row * windows.stride[0] + k, column * windows.stride[1] + l, c);
            assert_eq!(found, there.unwrap_or(0.0), "{windows:?} at {at}");
        }
        let places = |window: usize| {
            let (column, row, b) = (window % columns, window / columns % rows, window / columns / rows);
            (0..kernel * across)
                .map(move |at| (b, row * windows.stride[0] + at / across, column * windows.stride[1] + at % across))
        };
        let seen = |window: usize, c: usize| places(window).filter_map(move |(b, y, x)| pixel(b, y, x, c));
        if (0..2 * rows * columns).any(|window| seen(window, 0).next().is_none()) {
            continue; // such windows have no maximum
        }
        let y = tape.max_pool2d(&var, windows);
        for (at, &found) in y.value().data().iter().enumerate() {
            assert_eq!(found, seen(at / 3, at % 3).fold(f64::NEG_INFINITY, f64::max), "{windows:?} at {at}");
        }
    }
}

#[test]
fn the_same_padding_keeps_one_window_for_each_stride() {
    for (size, kernel, stride) in [([7, 8], 3, 2), ([5, 5], 7, 2), ([1, 9], 3, 1), ([8, 8], 2, 2), ([224, 10], 7, 2)] {
        let windows = Windows2d::same(size, kernel, stride);
        assert_eq!(windows.count(size), size.map(|n: usize| n.div_ceil(stride)), "{windows:?}");
        assert!(
            windows.after.iter().zip(windows.before).all(|(&after, before)| after == before || after == before + 1)
        );
    }
}

#[test]
fn convolutions_over_images() {
    for (windows, [height, width]) in WINDOWS {
        let inner = windows.kernel[0] * windows.kernel[1] * 3;
        let p = parameters(&[&[4, inner], &[4]]);
        let [w, b] = [p.find("p0").unwrap(), p.find("p1").unwrap()];
        check(&format!("{windows:?}"), &p, &[numbers(&[2, height, width, 3], 1)], &|tape, x| {
            (Some(tape.convolution(&x[0], windows, (w, Some(b)), Activation::Gelu)), 0.0)
        });
        let [rows, columns] = windows.count([height, width]);
        let inputs = [numbers(&[2, height, width, 3], 1), numbers(&[2, rows, columns, 4], 2)];
        check(&format!("{windows:?} with a residual"), &p, &inputs, &|tape, x| {
            (Some(tape.convolution_residual(&x[0], windows, (w, Some(b)), &x[1])), 0.0)
        });
    }
}

#[test]
fn a_convolution_with_packed_matrices_is_that_of_its_windows_for_any_number_of_threads() {
    let number = |at: usize| ((at * 37 % 101) as f32 - 50.0) / 40.0;
    let some = |shape: &[usize]| Tensor::new((0..shape.iter().product()).map(number).collect(), shape);
    for (windows, [height, width]) in WINDOWS.into_iter().chain([(Windows2d::square(1, 1, 0), [5, 4])]) {
        let mut p = Parameters::<f32>::new();
        let conv = Conv2d::new(&mut Builder::new(&mut p, 3), 3, 17, windows.kernel[0], true);
        if windows.kernel[0] != windows.kernel[1] {
            continue; // the layer has square windows
        }
        let [rows, columns] = windows.count([height, width]);
        let run = |p: &Parameters<f32>, threads: usize| {
            let (pool, machine) = (Pool::new(), Machine::new(threads));
            let mut tape = Tape::inference(p, &pool, &machine);
            let [x, residual] =
                [some(&[2, height, width, 3]), some(&[2, rows, columns, 17])].map(|tensor| tape.constant(tensor));
            let relu = conv.activated(&mut tape, &x, windows, Activation::Relu);
            let added = conv.added(&mut tape, &x, windows, &residual);
            [relu.value().data().to_vec(), added.value().data().to_vec()]
        };
        let plain = run(&p, 1);
        p.pack_for_inference();
        let packed = run(&p, 1);
        assert_eq!(packed, run(&p, 3), "{windows:?}");
        for (found, expected) in packed.iter().flatten().zip(plain.iter().flatten()) {
            assert!((found - expected).abs() < 1e-5, "{windows:?}: {found} for {expected}");
        }
        assert!(plain.iter().flatten().any(|&x| x == 0.0) && plain.iter().flatten().any(|&x| x > 0.5));
    }
}

#[test]
fn the_maximum_of_windows() {
    let p = parameters(&[]);
    for windows in [Windows2d::square(3, 2, 1), Windows2d::square(2, 2, 0), Windows2d::same([5, 6], 3, 2)] {
        check(&format!("{windows:?}"), &p, &[numbers(&[2, 5, 6, 3], 1)], &|tape, x| {
            (Some(tape.max_pool2d(&x[0], windows)), 0.0)
        });
    }
}

#[test]
fn group_norm_and_a_rectifier() {
    let p = parameters(&[&[6], &[6]]);
    let [gain, bias] = [p.find("p0").unwrap(), p.find("p1").unwrap()];
    for groups in [1, 2, 3, 6] {
        check(&format!("{groups} groups"), &p, &[numbers(&[2, 3, 2, 6], 1)], &|tape, x| {
            let y = tape.group_norm(&x[0], gain, bias, groups, 1e-5);
            (Some(tape.relu(y)), 0.0)
        });
    }
}

#[test]
fn groups_are_normalized_over_the_pixels_of_one_image() {
    let mut p = parameters(&[&[4], &[4]]);
    let [gain, bias] = [p.find("p0").unwrap(), p.find("p1").unwrap()];
    p.get_mut(gain).fill(1.0);
    p.get_mut(bias).fill(0.0);
    let (pool, machine) = (Pool::new(), Machine::new(2));
    let mut tape = Tape::inference(&p, &pool, &machine);
    let x = tape.constant(numbers(&[3, 5, 7, 4], 8));
    let y = tape.group_norm(&x, gain, bias, 2, 0.0);
    for image in y.value().data().chunks_exact(5 * 7 * 4) {
        for group in 0..2 {
            let values: Vec<f64> = image.chunks_exact(4).flat_map(|pixel| pixel[2 * group..][..2].to_vec()).collect();
            let mean = values.iter().sum::<f64>() / 70.0;
            let variance = values.iter().map(|x| x * x).sum::<f64>() / 70.0;
            assert!(mean.abs() < 1e-12 && (variance - 1.0).abs() < 1e-12, "{mean} {variance}");
        }
    }
}

#[test]
fn boxes_that_meet_lie_apart_and_lie_inside_each_other() {
    let boxes = [
        (0, [0.5, 0.5, 0.4, 0.3]),
        (1, [0.1, 0.9, 0.1, 0.1]),
        (2, [0.5, 0.45, 0.95, 0.9]),
        (4, [0.62, 0.4, 0.05, 0.02]),
        (5, [0.3, 0.7, 0.5, 0.2]),
    ];
    let p = parameters(&[]);
    check("boxes", &p, &[numbers(&[2, 3, 4], 3)], &|tape, x| {
        let target = BoxTarget { boxes: &boxes, distance: 1.5, overlap: 0.7, scale: 1.0 };
        (None, tape.box_loss(&x[0], target))
    });
}

#[test]
fn the_overlap_of_boxes_is_known_where_it_is_simple() {
    let of = |a, b| generalized_iou(a, b).0;
    let unit = [0.0, 0.0, 1.0, 1.0];
    assert_eq!(of(unit, unit), 1.0);
    assert_eq!(of(unit, [0.0, 0.0, 0.5, 1.0]), 0.5);
    // Side by side with a gap of their width: no overlap, and a third of the hull is empty.
    assert!((of(unit, [2.0, 0.0, 3.0, 1.0]) + 1.0 / 3.0).abs() < 1e-12);
    // The overlap is a quarter of each box; the union is seven quarters, the hull nine.
    assert!((of(unit, [0.5, 0.5, 1.5, 1.5]) - (1.0 / 7.0 - 2.0 / 9.0)).abs() < 1e-12);
    assert_eq!(edges([0.5, 0.25, 0.5, 0.5]), [0.25, 0.0, 0.75, 0.5]);
}
