//! Names of places, rivers and people, built from syllables.

use crate::draws::Draws;

const PLACES: [&str; 24] = [
    "Al", "Bran", "Cor", "Dun", "El", "Fal", "Grim", "Har", "Ist", "Kel", "Lor", "Mar", "Nor", "Os", "Pel", "Quen",
    "Ros", "Sel", "Tam", "Ul", "Ver", "Wen", "Yar", "Zel",
];
const ENDS: [&str; 16] = [
    "burg", "dale", "den", "field", "ford", "ham", "haven", "mere", "mouth", "rick", "stead", "ton", "vale", "wick",
    "wold", "worth",
];
const RIVERS: [&str; 12] =
    ["Arle", "Besk", "Cray", "Dorn", "Ebben", "Farn", "Glim", "Ister", "Lune", "Morva", "Sarn", "Teva"];
const FIRST: [&str; 30] = [
    "Ada", "Ben", "Clara", "David", "Edith", "Frank", "Greta", "Hugo", "Ines", "Jonas", "Karin", "Leo", "Mona", "Nils",
    "Olga", "Paul", "Rita", "Simon", "Tessa", "Udo", "Vera", "Walter", "Yara", "Zeno", "Anna", "Boris", "Celia",
    "Dora", "Emil", "Flora",
];
const LAST: [&str; 20] = [
    "Ab", "Bor", "Cald", "Dren", "Eck", "Fen", "Gold", "Hart", "Jor", "Kest", "Lind", "Mel", "Nor", "Orl", "Pram",
    "Rud", "Stav", "Tor", "Vind", "Wal",
];
const LAST_ENDS: [&str; 14] =
    ["ander", "berg", "by", "er", "feld", "gren", "in", "ley", "man", "mark", "ov", "sen", "stein", "well"];

/// Distinct places.
pub(super) fn places<const N: usize>(draws: &mut Draws) -> [String; N] {
    apart(|| format!("{}{}", draws.pick(&PLACES), draws.pick(&ENDS)))
}

/// Distinct people.
pub(super) fn people<const N: usize>(draws: &mut Draws) -> [String; N] {
    apart(|| format!("{} {}{}", draws.pick(&FIRST), draws.pick(&LAST), draws.pick(&LAST_ENDS)))
}

/// A river.
pub(super) fn river(draws: &mut Draws) -> String {
    draws.pick(&RIVERS).to_owned()
}

/// Draws `N` names, none of which contains another.
fn apart<const N: usize>(mut drawn: impl FnMut() -> String) -> [String; N] {
    let mut found: Vec<String> = Vec::new();
    while found.len() < N {
        let next = drawn();
        if !found.iter().any(|other| other.contains(&next) || next.contains(other.as_str())) {
            found.push(next);
        }
    }
    found.try_into().expect("as many were drawn")
}

/// Whether a word is a place, a river or part of a person's name.
#[cfg(test)]
pub(super) fn is_name(word: &str) -> bool {
    let made = |starts: &[&str], ends: &[&str]| {
        starts.iter().any(|start| ends.iter().any(|end| word == format!("{start}{end}")))
    };
    made(&PLACES, &ENDS) || made(&LAST, &LAST_ENDS) || FIRST.contains(&word) || RIVERS.contains(&word)
}
