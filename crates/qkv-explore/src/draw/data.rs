//! Weights as data for other programs: `.npy`, `.safetensors`, JSON and CSV. Pharaoh links are in [`Matrix::pharaoh`].

use crate::file::Writer;
use crate::words::Matrix;
use qkv_models::{Error, Result};

/// Byte alignment of the data in `.npy`.
const ALIGNED: usize = 64;

impl Matrix {
    fn flat(&self) -> Result<Vec<u8>> {
        let [rows, columns] = [self.rows.len(), self.columns.len()];
        if self.weights.len() != rows || self.weights.iter().any(|row| row.len() != columns) {
            return Err(Error::invalid(format!(
                "the number of weights does not match their {rows} × {columns} labels"
            )));
        }
        Ok(self.weights.iter().flatten().flat_map(|weight| weight.to_le_bytes()).collect())
    }

    /// As `.npy`, version 1: f32 in C order, `[rows, columns]`.
    ///
    /// ```
    /// let (rows, columns) = (vec!["a".into()], vec!["b".into()]);
    /// let matrix = qkv_explore::Matrix { rows, columns, weights: vec![vec![1.0]] };
    /// let npy = matrix.npy()?;
    /// assert_eq!((&npy[..6], npy.len(), &npy[128..]), (&b"\x93NUMPY"[..], 132, &1.0f32.to_le_bytes()[..]));
    /// # Ok::<(), qkv_models::Error>(())
    /// ```
    ///
    /// # Errors
    /// If there is not one weight per row and column.
    pub fn npy(&self) -> Result<Vec<u8>> {
        let data = self.flat()?;
        let shape = format!("({}, {})", self.rows.len(), self.columns.len());
        let mut header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}");
        let before = b"\x93NUMPY\x01\x00".len() + 2;
        let filled = (before + header.len() + 1).next_multiple_of(ALIGNED) - before - 1;
        header += &" ".repeat(filled - header.len());
        header.push('\n');
        let length = u16::try_from(header.len()).map_err(|_| Error::invalid("the shape is too long for `.npy`"))?;
        Ok([b"\x93NUMPY\x01\x00", &length.to_le_bytes()[..], header.as_bytes(), &data].concat())
    }

    /// As `.safetensors`: `weights` `[rows, columns]`, F32, and the labels as JSON lists in the metadata,
    /// `query_tokens` for the rows and `key_tokens` for the columns. The same weights give the same bytes.
    ///
    /// # Errors
    /// If there is not one weight per row and column.
    pub fn safetensors(&self) -> Result<Vec<u8>> {
        self.flat()?;
        let labels = |labels: &[String]| serde_json::to_string(labels).expect("texts are plain data");
        let mut to = Writer::default();
        to.floats("weights".into(), &[self.rows.len(), self.columns.len()], &self.weights.concat());
        Ok(to.bytes(&[("key_tokens", &labels(&self.columns)), ("query_tokens", &labels(&self.rows))]))
    }

    /// As JSON: `rows`, `columns` and `weights`, one list for each row.
    pub fn json(&self) -> String {
        serde_json::to_string(self).expect("plain data") + "\n"
    }

    /// As CSV (RFC 4180): the labels of the columns, then one line for each row, its label first. Labels are always
    /// quoted.
    ///
    /// ```
    /// let (rows, columns) = (vec!["\"".into()], vec![",".into()]);
    /// let matrix = qkv_explore::Matrix { rows, columns, weights: vec![vec![0.25]] };
    /// assert_eq!(matrix.csv(), "\"\",\",\"\r\n\"\"\"\",0.25\r\n");
    /// ```
    pub fn csv(&self) -> String {
        let quoted = |label: &str| format!("\"{}\"", label.replace('"', "\"\""));
        let head = ["\"\"".to_owned()].into_iter().chain(self.columns.iter().map(|label| quoted(label)));
        let mut csv = head.collect::<Vec<_>>().join(",") + "\r\n";
        for (label, row) in self.rows.iter().zip(&self.weights) {
            let cells = [quoted(label)].into_iter().chain(row.iter().map(f32::to_string));
            csv += &cells.collect::<Vec<_>>().join(",");
            csv += "\r\n";
        }
        csv
    }
}
