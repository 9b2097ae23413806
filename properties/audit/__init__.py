"""Audits an event log that an engine wrote: does its history contradict itself?"""
