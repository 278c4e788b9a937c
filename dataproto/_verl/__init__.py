"""What code written for verl finds here: conversion to its classes and bytes, and its dispatch."""
