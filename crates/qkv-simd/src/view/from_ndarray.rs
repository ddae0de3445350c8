//! Views of `ndarray` arrays of two, three or four axes, with any strides.

use super::{View, ViewMut};
use ndarray::{ArrayBase, ArrayRef, Data, DataMut, Ix2, Ix3, Ix4};
use std::marker::PhantomData;

impl<'a, T, S: Data<Elem = T>> From<&'a ArrayBase<S, Ix4>> for View<'a, T> {
    fn from(array: &'a ArrayBase<S, Ix4>) -> Self {
        let array: &ArrayRef<T, Ix4> = array;
        let (b, h, n, d) = array.dim();
        let strides: [isize; 4] = array.strides().try_into().expect("four axes");
        // A borrow of an array is a valid view: every element lies inside the memory that it borrows.
        View { data: array.as_ptr(), shape: [b, h, n, d], strides, borrowed: PhantomData }
    }
}

impl<'a, T, S: Data<Elem = T>> From<&'a ArrayBase<S, Ix3>> for View<'a, T> {
    fn from(array: &'a ArrayBase<S, Ix3>) -> Self {
        let (h, n, d) = array.dim();
        let [s0, s1, s2]: [isize; 3] = array.strides().try_into().expect("three axes");
        View { data: array.as_ptr(), shape: [1, h, n, d], strides: [0, s0, s1, s2], borrowed: PhantomData }
    }
}

impl<'a, T, S: Data<Elem = T>> From<&'a ArrayBase<S, Ix2>> for View<'a, T> {
    fn from(array: &'a ArrayBase<S, Ix2>) -> Self {
        let (n, d) = array.dim();
        let [s0, s1]: [isize; 2] = array.strides().try_into().expect("two axes");
        View { data: array.as_ptr(), shape: [1, 1, n, d], strides: [0, 0, s0, s1], borrowed: PhantomData }
    }
}

impl<'a, T, S: DataMut<Elem = T>> From<&'a mut ArrayBase<S, Ix4>> for ViewMut<'a, T> {
    fn from(array: &'a mut ArrayBase<S, Ix4>) -> Self {
        let (b, h, n, d) = array.dim();
        let strides: [isize; 4] = array.strides().try_into().expect("four axes");
        ViewMut { data: array.as_mut_ptr(), shape: [b, h, n, d], strides, count: None, borrowed: PhantomData }
    }
}
