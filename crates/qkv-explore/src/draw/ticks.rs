//! Tick labels of a color bar: round weights at their levels.

use super::scale::{DECADES, Scale, Scaled};

/// Minimum distance between ticks, as a fraction of the bar.
const APART: f32 = 0.11;

/// Ticks as level and label, ascending.
pub(crate) fn ticks(scaled: &Scaled) -> Vec<(f32, String)> {
    let largest = scaled.largest();
    let mut ticks: Vec<(f32, String)> = match scaled.scale() {
        Scale::Linear => {
            let step = round_step(f64::from(largest) / 4.0);
            let count = (f64::from(largest) / step * (1.0 + 1e-6)).floor() as usize;
            let at = |i: usize| (scaled.place((step * i as f64) as f32), number(step * i as f64, step));
            (0..=count).map(at).collect()
        }
        Scale::Log => {
            let first = largest.log10().floor() as i32;
            let powers = (first - DECADES as i32..=first).map(|power| 10f64.powi(power));
            let seen = powers.filter(|&weight| weight as f32 >= scaled.weight(0.0) * 0.999);
            seen.map(|weight| (scaled.place(weight as f32), number(weight, weight))).collect()
        }
        Scale::Rank => vec![(0.0, "least".into()), (0.5, "by rank".into()), (1.0, "most".into())],
    };
    let mut last = f32::NEG_INFINITY;
    ticks.retain(|(place, _)| {
        let keeps = place - last >= APART;
        if keeps {
            last = *place;
        }
        keeps
    });
    ticks
}

/// A step of 1, 2 or 5 times a power of ten near the requested one.
fn round_step(about: f64) -> f64 {
    let power = 10f64.powf(about.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().find(|step| step * power >= about * 0.999).unwrap_or(10.0);
    step * power
}

/// A number with as many digits as its step needs.
pub(crate) fn number(x: f64, step: f64) -> String {
    let digits = -step.log10().floor();
    match digits {
        _ if x == 0.0 => "0".into(),
        digits if !(-6.0..=4.0).contains(&digits) => format!("{x:.0e}"),
        digits => format!("{x:.*}", digits.max(0.0) as usize),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(scale: Scale, largest: f32) -> Vec<String> {
        ticks(&scale.over([largest].into_iter())).into_iter().map(|(_, name)| name).collect()
    }

    #[test]
    fn numbers_beside_the_bar_are_round() {
        assert_eq!(names(Scale::Linear, 1.0), ["0", "0.5", "1.0"]);
        assert_eq!(names(Scale::Linear, 0.7), ["0", "0.2", "0.4", "0.6"]);
        assert_eq!(names(Scale::Linear, 0.013), ["0", "0.005", "0.010"]);
        assert_eq!(names(Scale::Log, 0.7), ["0.0001", "0.001", "0.01", "0.1"]);
        assert_eq!(names(Scale::Linear, 1e-9), ["0", "5e-10", "1e-9"]);
        assert_eq!(names(Scale::Rank, 0.7), ["least", "by rank", "most"]);
    }

    #[test]
    fn a_number_stands_at_its_weight() {
        for scale in [Scale::Linear, Scale::Log] {
            let scaled = scale.over([0.83f32].into_iter());
            for (place, name) in ticks(&scaled) {
                let weight: f32 = name.parse().unwrap();
                assert!((scaled.place(weight) - place).abs() < 1e-5, "{name} at {place}");
            }
        }
    }
}
