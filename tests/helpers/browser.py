"""Chromium without a window, for the tests of pages."""

import base64
import io
import json
import shutil
import time

import numpy as np
from PIL import Image
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.actions.action_builder import ActionBuilder
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

PROGRAMS = ('chromium', 'chromedriver')
FLAGS = (
    'headless',
    'no-sandbox',
    'disable-gpu',
    'disable-quic',
    'disable-dev-shm-usage',
    'no-first-run',
    'disable-background-networking',
    'disable-component-update',
    'disable-sync',
    'window-size=1280,1400',
)
KEYS = dict(
    up=Keys.ARROW_UP,
    down=Keys.ARROW_DOWN,
    left=Keys.ARROW_LEFT,
    right=Keys.ARROW_RIGHT,
    escape=Keys.ESCAPE,
    enter=Keys.ENTER,
    space=Keys.SPACE,
    tab=Keys.TAB,
)


def missing_programs():
    """The programs that are needed and not installed."""
    return [program for program in PROGRAMS if shutil.which(program) is None]


class Browser:
    """A browser that shows one page of the explorer after another.

    Args:
        folder (Path): For its profile; empty.
    """

    def __init__(self, folder):
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which('chromium')
        for flag in (*FLAGS, f'user-data-dir={folder}'):
            options.add_argument(f'--{flag}')
        options.set_capability('goog:loggingPrefs', dict(browser='ALL', performance='ALL'))
        self.driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which('chromedriver')))
        self.script = self.driver.execute_script
        self.command = self.driver.execute_cdp_cmd

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.driver.quit()

    def blank(self):
        """An empty page, and no entries in the logs."""
        self.driver.get('about:blank')
        self.logs()

    def open(self, path, state=''):
        """Opens a page anew and waits until it shows something."""
        self.blank()
        self.driver.get(f'{path.as_uri()}{state}')
        self.wait("!document.getElementById('main').hidden")

    def logs(self):
        """The console's entries, and the addresses that were asked for."""
        events = [json.loads(entry['message'])['message'] for entry in self.driver.get_log('performance')]
        return self.driver.get_log('browser'), [
            event['params']['request']['url'] for event in events if event['method'] == 'Network.requestWillBeSent'
        ]

    def wait(self, condition):
        end = time.time() + 60
        while not self.script(f'return {condition}'):
            assert time.time() < end, f'{condition} does not come true'
            time.sleep(0.02)

    def settle(self):
        """Waits until the page has shown what was asked for, told it and put it into the address."""
        self.driver.execute_async_script('const done = arguments[0]; requestAnimationFrame(() => setTimeout(done))')
        self.wait('frame === null && settling === null')

    def state(self, state):
        """Changes the address; the page hears of it later, after more than a frame if the machine is busy."""
        self.driver.execute_async_script(
            'const [state, done] = arguments, before = location.href; location.hash = state;'
            "location.href === before ? done() : addEventListener('hashchange', () => done(), {once: true})",
            state,
        )
        self.settle()

    def text(self, name):
        return self.script('return document.getElementById(arguments[0]).textContent', name).replace('−', '-')

    def number(self, name):
        return float(self.text(name))

    def image(self, selector):
        """The pixels of a canvas, ``(h, w, 4)``."""
        url = self.script('return document.querySelector(arguments[0]).toDataURL()', selector)
        return np.array(Image.open(io.BytesIO(base64.b64decode(url.split(',')[1]))))

    def place(self, name, row, column):
        """Where the middle of a token of a canvas is in the window."""
        return self.script(
            'const [name, row, column] = arguments, box = document.getElementById(name).getBoundingClientRect(); '
            'return [box.left + (column + 0.5) * box.width / width, box.top + (row + 0.5) * box.height / height]',
            name,
            row,
            column,
        )

    def at(self, name, row, column, click=False):
        """Moves the pointer to a token of a canvas."""
        x, y = self.place(name, row, column)
        actions = ActionBuilder(self.driver, duration=0)
        actions.pointer_action.move_to_location(round(x), round(y))
        if click:
            actions.pointer_action.click()
        actions.perform()
        self.settle()

    def click(self, selector):
        """Clicks on the first element of a kind with the mouse."""
        self.driver.find_element(By.CSS_SELECTOR, selector).click()
        self.settle()

    def touch(self, *places):
        """A finger that comes down at the first place and goes to the others."""
        points = [[dict(x=x, y=y)] for x, y in places]
        kinds = ['touchStart', *['touchMove'] * (len(places) - 1), 'touchEnd']
        for kind, point in zip(kinds, [*points, []]):
            self.command('Input.dispatchTouchEvent', dict(type=kind, touchPoints=point))
        self.settle()

    def press(self, selector, *keys):
        """Presses keys while an element has the focus."""
        self.script('arguments[0].focus()', self.driver.find_element(By.CSS_SELECTOR, selector))
        ActionChains(self.driver, duration=0).send_keys(*(KEYS[key] for key in keys)).perform()
        self.settle()
