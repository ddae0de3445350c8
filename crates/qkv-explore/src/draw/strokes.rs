//! A built-in stroke font for machines without fonts. A glyph is a list of strokes, a stroke a list of two-digit
//! points: x to the right, then y down from cap height, with the baseline at 6. A stroke of one point is a dot.

/// One grid unit in em.
pub(crate) const UNIT: f64 = 0.115;
/// Thickness of a stroke in em.
pub(crate) const THICK: f64 = 0.085;
/// Spacing between glyphs in grid units.
const APART: f64 = 1.6;
/// Width of a space in grid units.
const SPACE: f64 = 3.0;

/// A grid point.
type Point = (f64, f64);

/// The strokes of a character, if the font has it.
pub(crate) fn strokes(c: char) -> Option<impl Iterator<Item = Vec<Point>>> {
    let at = LETTERS.iter().position(|(letter, _)| *letter == c)?;
    let digit = |byte: u8| f64::from(byte - b'0');
    let points = move |stroke: &str| stroke.as_bytes().chunks_exact(2).map(|p| (digit(p[0]), digit(p[1]))).collect();
    Some(LETTERS[at].1.split_whitespace().map(points))
}

/// Advance width in em.
pub(crate) fn advance(c: char) -> f64 {
    let right = strokes(c).into_iter().flatten().flatten().map(|(x, _)| x).reduce(f64::max);
    UNIT * right.map_or(SPACE, |right| right + APART)
}

const LETTERS: &[(char, &str)] = &[
    (' ', ""),
    ('!', "0004 06"),
    ('"', "0002 2022"),
    ('#', "1016 3036 0242 0444"),
    ('$', "413010010213334445361605 2026"),
    ('%', "4006 0010110100 3545463635"),
    ('&', "46011020310405162644"),
    ('\'', "0002"),
    ('(', "10010516"),
    (')', "00111506"),
    ('*', "2024 0143 0341"),
    ('+', "2125 0343"),
    (',', "1507"),
    ('-', "0333"),
    ('.', "06"),
    ('/', "0640"),
    ('0', "103041453616050110"),
    ('1', "011016 0626"),
    ('2', "01103041420646"),
    ('3', "0110304142334445361605 1333"),
    ('4', "36300444"),
    ('5', "400002324345361605"),
    ('6', "30100105163645443303"),
    ('7', "004016"),
    ('8', "13020110304142331304051636454433"),
    ('9', "16364541301001021343"),
    (':', "03 06"),
    (';', "13 1507"),
    ('<', "310335"),
    ('=', "0242 0444"),
    ('>', "013305"),
    ('?', "01103041422324 26"),
    ('@', "34141232344441301001051646"),
    ('A', "062046 1434"),
    ('B', "0333444536060030414233"),
    ('C', "4130100105163645"),
    ('D', "00062644422000"),
    ('E', "40000646 0333"),
    ('F', "400006 0333"),
    ('G', "41301001051636454323"),
    ('H', "0006 4046 0343"),
    ('I', "0020 1016 0626"),
    ('J', "4045361605"),
    ('K', "0006 400346"),
    ('L', "000646"),
    ('M', "0600234046"),
    ('N', "06004640"),
    ('O', "103041453616050110"),
    ('P', "06003041423303"),
    ('Q', "103041453616050110 2446"),
    ('R', "06003041423303 2346"),
    ('S', "413010010213334445361605"),
    ('T', "0040 2026"),
    ('U', "000516364540"),
    ('V', "002640"),
    ('W', "0016233640"),
    ('X', "0046 4006"),
    ('Y', "002340 2326"),
    ('Z', "00400646"),
    ('[', "20000626"),
    ('\\', "0046"),
    (']', "00202606"),
    ('^', "022042"),
    ('_', "0747"),
    ('`', "0011"),
    ('a', "1232434616051444"),
    ('b', "00063645433202"),
    ('c', "421203051646"),
    ('d', "40461605031242"),
    ('e', "044443321203051646"),
    ('f', "30201116 0232"),
    ('g', "421203051646 42473808"),
    ('h', "0006 02324346"),
    ('i', "00 0206"),
    ('j', "20 22271808"),
    ('k', "0006 320446"),
    ('l', "000516"),
    ('m', "0602122326 23324346"),
    ('n', "0602 02324346"),
    ('o', "123243453616050312"),
    ('p', "08023243453606"),
    ('q', "48421203051646"),
    ('r', "0602 031232"),
    ('s', "4212031434453606"),
    ('t', "10152636 0232"),
    ('u', "02051646 4246"),
    ('v', "022642"),
    ('w', "0216243642"),
    ('x', "0246 4206"),
    ('y', "02051646 42473808"),
    ('z', "02420646"),
    ('{', "20111203141526"),
    ('|', "0007"),
    ('}', "00111223141506"),
    ('~', "03123443"),
    ('…', "06 26 46"),
    ('·', "03"),
    ('×', "0246 4206"),
    ('−', "0343"),
    ('→', "0343 214325"),
    ('⏹', "0242460602"),
    ('▶', "01430501"),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draw::letters::text_width;

    #[test]
    fn every_letter_of_ascii_has_strokes_of_whole_points() {
        for c in ' '..='~' {
            assert!(strokes(c).is_some(), "{c}");
        }
        for (c, strokes) in LETTERS {
            let whole =
                |stroke: &str| stroke.len().is_multiple_of(2) && stroke.bytes().all(|byte| byte.is_ascii_digit());
            assert!(strokes.split_whitespace().all(whole), "{c}");
        }
    }

    #[test]
    fn no_glyph_is_wider_than_estimated() {
        for c in ' '..='~' {
            assert!(advance(c) <= text_width(&c.to_string()) + 0.3, "{c}: {}", advance(c));
        }
        let text = "what a model attended to, in words of its own";
        assert!(text.chars().map(advance).sum::<f64>() <= text_width(text) * 1.02);
    }
}
